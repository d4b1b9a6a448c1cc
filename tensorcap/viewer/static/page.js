// The server draws and decides; this script only scrolls, points and asks.
const $ = id => document.getElementById(id)
const [choice, list, rows, tree, inspector] = ['choice', 'navigator', 'rows', 'tree', 'inspector'].map($)
const root = document.documentElement
const HEIGHT = 22, MARGIN = 60, PATIENCE = 90 // of a row; rows around what is seen; ms before charts are asked for

// A fragment for each purpose, of which only the last one asked for arrives; what fails is told and not thrown.
const pending = {}
async function ask(purpose, url, read = answer => answer.text()) {
  pending[purpose]?.abort()
  const { signal } = pending[purpose] = new AbortController()
  try {
    const answer = await fetch(url, { signal })
    if (!answer.ok) throw new Error(answer.status === 404 && purpose === 'state' ? 'The server has another page by now.' : await answer.text())
    const content = await read(answer)
    if (signal.aborted) return undefined
    fail('')
    return content
  } catch (error) {
    if (error.name !== 'AbortError') fail(error instanceof TypeError ? 'The server does not answer. Trying again …' : error.message)
    return undefined
  }
}
// What an answer said of another file stays, whatever else is answered meanwhile.
function fail(text, of = 'page') {
  if (text || fail.of === of) Object.assign($('failure'), { hidden: !text, textContent: text })
  if (text) fail.of = of
}
const query = form => new URLSearchParams(new FormData(form))

// Navigator: a window of rows around what is seen
let position = -1, total = 0, seen = 0, wanted = false, reordered = false, shown = '', nextRed = -1, arriving
async function showRows(more = '') {
  const first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - MARGIN)
  const count = Math.ceil(list.clientHeight / HEIGHT) + 2 * MARGIN
  const around = reordered ? `&around=${shown}` : ''
  const html = await ask('rows', `rows?${query(choice)}&first=${first}&count=${count}&after=${position}${around}${more}`)
  if (html === undefined) return
  rows.innerHTML = html
  const part = rows.firstElementChild
  part.style.top = `${part.dataset.first * HEIGHT}px`
  total = +part.dataset.total
  nextRed = +part.dataset.red
  rows.style.height = `${total * HEIGHT}px`
  const held = document.activeElement.dataset.status
  for (const said of rows.querySelectorAll('[data-for]')) $(said.dataset.for)?.replaceChildren(...said.childNodes)
  if (held) document.querySelector(`#counts [data-status="${held}"]`)?.focus()
  if (reordered) {
    reordered = false
    position = +part.dataset.position
    seen = list.scrollTop = Math.max(0, position * HEIGHT - list.clientHeight / 2)
  }
  mark()
}
const rowAt = at => rows.firstElementChild?.children[at - rows.firstElementChild.dataset.first]
// Scrolling asks for rows, too, and the last request wins: whichever answer brings the selected row opens it.
function mark() {
  for (const old of document.querySelectorAll('.row[aria-selected]')) old.removeAttribute('aria-selected')
  for (const row of document.querySelectorAll(`.row[data-number="${shown}"]`)) row.setAttribute('aria-selected', 'true')
  const module = decodeURIComponent($('within').dataset.module ?? '')
  for (const row of rows.querySelectorAll('.row')) row.classList.toggle('lit', row.querySelector('.module').textContent === module && !!module)
  const row = rowAt(position)
  if (!wanted || !row) return
  wanted = false
  open(row.dataset.number)
}
async function select(at, step = 0) {
  for (let last; reordered && last !== arriving; await last) last = arriving // whose first or next row is meant
  if (!total) return
  position = Math.min(Math.max((at ?? position) + step, 0), total - 1)
  wanted = true
  const top = position * HEIGHT, height = list.clientHeight
  if (top < list.scrollTop) list.scrollTop = top
  if (top + HEIGHT > list.scrollTop + height) list.scrollTop = top + HEIGHT - height
  mark()
  if (wanted) showRows()
}
// Another order or selection: what is open stays marked where it now stands, if it does.
function choose() {
  wanted = false
  reordered = true
  return arriving = showRows()
}
// Something that is not in view, or not even in the list: open it, and go there.
let going
const goTo = number => going = number === undefined || number === '' ? going : open(number).then(choose)
list.onscroll = () => {
  if (Math.abs(list.scrollTop - seen) < HEIGHT * MARGIN / 2 && rowAt(Math.floor(list.scrollTop / HEIGHT))) return
  seen = list.scrollTop
  showRows()
}
list.onclick = event => {
  const row = event.target.closest('.row')
  if (row) select([...row.parentNode.children].indexOf(row) + +row.parentNode.dataset.first)
}
choice.onsubmit = event => event.preventDefault()
choice.oninput = event => {
  if (event.target.id === 'tree-mode') return showTree(event.target.checked)
  return choose()
}
$('counts')?.addEventListener('click', event => {
  const status = event.target.closest('button')?.dataset.status
  if (status === undefined) return
  choice.status.value = choice.status.value === status ? '' : status
  choose()
})
function under(module) {
  choice.under.value = choice.under.value === module ? '' : module
  for (const old of document.querySelectorAll('.chosen')) old.classList.remove('chosen')
  const chosen = choice.under.value
  if (chosen) document.querySelector(`#modules [data-under="${CSS.escape(chosen)}"]`)?.classList.add('chosen')
  $('within').textContent = chosen ? `in ${decodeURIComponent(chosen)} (u: all)` : ''
  choose()
}

// Modules: what is in one is asked for when it is opened; one that is clicked filters the list
async function fill(module, whole) {
  if (module.children.length > 1) return
  const html = await ask(`modules ${module.dataset.under}`, `modules?under=${encodeURIComponent(module.dataset.under)}${whole ? '&rows=' : ''}`)
  if (html !== undefined && module.children.length === 1) module.insertAdjacentHTML('beforeend', html)
  mark()
}
for (const box of [$('modules'), tree]) box.addEventListener('toggle', event => event.target.open && fill(event.target, box === tree), true)
$('modules').onclick = event => {
  const module = event.target.closest('details')
  if (module) under(module.dataset.under)
}
async function showTree(on) {
  list.hidden = on
  tree.hidden = !on
  if (on && !tree.children.length) tree.innerHTML = await ask('tree', 'modules?under=&rows=') ?? ''
  if (!on) return choose()
  for (let path = ''; path !== undefined && shown;) { // open the modules around what is selected
    const parts = decodeURIComponent(inspector.querySelector('#shown')?.dataset.module ?? '').split('.')
    path = path ? parts.slice(0, path.split('.').length + 1).join('.') : parts[0]
    const module = path && tree.querySelector(`[data-under="${CSS.escape(encodeURIComponent(path))}"]`)
    if (!module) break
    await fill(module, true)
    module.open = true
    if (path.split('.').length === parts.length) break
  }
  mark()
  tree.querySelector('[aria-selected]')?.scrollIntoView({ block: 'center' })
}
tree.onclick = event => {
  const row = event.target.closest('.row')
  if (row) open(row.dataset.number)
  stand(row ?? event.target.closest('summary'))
}
function stand(at) { // in the tree
  tree.querySelector('.here')?.classList.remove('here')
  at?.classList.add('here')
  at?.scrollIntoView({ block: 'nearest' })
}
function walkTree(key) {
  const visible = [...tree.querySelectorAll('.row, summary')].filter(one => one.checkVisibility())
  const here = tree.querySelector('.here') ?? tree.querySelector('[aria-selected]')
  const at = visible.indexOf(here), module = here?.closest('details')
  if (key === 'ArrowRight' && here?.matches('summary')) module.open = true
  else if (key === 'ArrowLeft') {
    if (here?.matches('summary') && module.open) module.open = false
    else stand((here?.matches('summary') ? module.parentNode.closest('details') : module)?.firstElementChild ?? here)
  } else if (key in STEPS) {
    const next = visible[Math.min(Math.max(at + STEPS[key], 0), visible.length - 1)]
    stand(next)
    if (next?.matches('.row')) open(next.dataset.number)
  }
}

// Inspector: all of one tensor, its maps, and the values below the pointer
let values
async function open(number) {
  shown = `${number}`
  mark()
  const html = await ask('row', `row/${number}${$('view')?.log?.checked ? '?log=' : ''}`)
  if (html === undefined) return
  const log = $('view')?.log?.checked
  inspector.innerHTML = html
  inspector.scrollTop = 0
  if (log && $('view')?.log) $('view').log.checked = true
  if ($('view')) $('view').oninput = event => {
    if (event.target.name === 'rows' || event.target.name === 'columns') $('view').box.value = ''
    showMaps()
  }
  values = undefined
  pins()
  point()
  $('within').dataset.module = $('shown').dataset.module
  mark()
  clearTimeout(open.later)
  open.later = setTimeout(() => showBeside(number), PATIENCE) // a reader who walks on does not wait for it
}
async function showBeside(number) {
  await Promise.all([
    put('beside', $('beside'), `row/${number}/beside`),
    showSource(),
    $('view') && put('charts', $('charts'), `row/${number}/charts`),
  ])
}
async function put(purpose, place, url) {
  const html = await ask(purpose, url)
  if (html !== undefined && place.isConnected) place.innerHTML = html
}
async function showSource(more = '') {
  await put('source', $('text'), `row/${shown}/source?side=${showSource.side ?? ''}${more}`)
  const line = $('text').querySelector('.hll'), box = $('source')
  box.scrollTop = line ? line.offsetTop - box.offsetTop - box.clientHeight / 2 : 0
}
$('text').onclick = event => {
  const button = event.target.closest('button')
  if (!button) return
  if (button.dataset.side) showSource.side = button.dataset.side
  showSource(button.dataset.module === undefined ? '' : `&module=${encodeURIComponent(button.dataset.module)}`)
}
// Where it is on the curves
function point() {
  const curve = $('curves')
  if (curve) ask('place', `place/${shown}`, answer => answer.json()).then(x => {
    for (const line of curve.querySelectorAll('.here')) line.setAttribute('d', x === null || x === undefined ? '' : `M${x},0V400`)
  })
}
async function showMaps(more = '') {
  const view = $('view')
  if (!view) return
  const html = await ask('maps', `row/${shown}/maps?${query(view)}${more}`)
  if (html === undefined || !view.isConnected) return // of a tensor that is open no more
  $('maps').innerHTML = html
  values = undefined
  const plane = $('plane')?.dataset
  if (!plane) return
  const at = plane.at.split(','), drawn = plane.drawn.split(',')
  view.rows.value = drawn[0]
  view.columns.value = drawn[1]
  if (view.box.value) view.box.value = plane.box
  for (const input of view.querySelectorAll('[name^=at]')) {
    const axis = input.name.slice(2)
    if (document.activeElement !== input) input.value = at[axis]
    input.parentNode.hidden = drawn.includes(axis) || input.max === '0'
  }
  pins()
}
function pins() {
  const [height, width] = $('plane')?.dataset.size.split(',') ?? []
  for (const pin of inspector.querySelectorAll('.pin')) {
    pin.style.left = `${100 * (+pin.dataset.column + 0.5) / width}%`
    pin.style.top = `${100 * (+pin.dataset.row + 0.5) / height}%`
  }
}
const numbers = text => text.split(',').map(Number)
function cellAt(event, map) {
  const part = $('plane').dataset, [h, w] = numbers(part.size)
  const { left, top, width, height } = map.getBoundingClientRect()
  const within = (at, size) => Math.min(Math.max(Math.floor(at), 0), size - 1)
  return { r: within((event.clientY - top) / height * h, h), c: within((event.clientX - left) / width * w, w), h, w, part }
}
inspector.onmousemove = async event => {
  if (!event.target.matches?.('.map')) return
  values ??= ask('values', `row/${shown}/values?${query($('view'))}`, answer => answer.arrayBuffer())
  const { r, c, h, w, part } = cellAt(event, event.target)
  const all = new Float64Array(await values ?? 0), names = part.names.split(',')
  if (all.length !== names.length * h * w) return
  const [box, cell, drawn, index] = [part.box, part.cell, part.drawn, part.at].map(numbers)
  index[drawn[0]] = box[0] + r * cell[0]
  index[drawn[1]] = box[2] + c * cell[1]
  const texts = names.map((name, map) => `${name} ${all[map * h * w + r * w + c].toPrecision(6)}`)
  $('hover').textContent = `[${index}]  ${texts.join('  ')}`
}
inspector.onmousedown = event => {
  if (!event.target.matches('.map') || event.button) return
  const map = event.target, from = cellAt(event, map)
  const band = document.body.appendChild(Object.assign(document.createElement('div'), { id: 'band' }))
  onmousemove = move => Object.assign(band.style, {
    left: `${Math.min(event.clientX, move.clientX)}px`, top: `${Math.min(event.clientY, move.clientY)}px`,
    width: `${Math.abs(event.clientX - move.clientX)}px`, height: `${Math.abs(event.clientY - move.clientY)}px`,
  })
  onmouseup = up => {
    onmousemove = onmouseup = null
    band.remove()
    const to = cellAt(up, map)
    if (from.r === to.r || from.c === to.c) return
    const [box, cell] = [from.part.box, from.part.cell].map(numbers)
    const ends = (a, b, start, step) => [start + Math.min(a, b) * step, start + (Math.max(a, b) + 1) * step]
    $('view').box.value = [...ends(from.r, to.r, box[0], cell[0]), ...ends(from.c, to.c, box[2], cell[1])]
    showMaps()
  }
}
const showWhole = () => showMaps($('view').box.value = '')
inspector.ondblclick = event => event.target.matches('.map') && showWhole()
inspector.onclick = event => {
  const id = event.target.closest('button')?.id
  if (id === 'worst') showMaps('&worst=')
  else if (id === 'whole') showWhole()
  else if (id === 'diagnose') {
    $('diagnosis').textContent = 'Diagnosing …'
    put('diagnosis', $('diagnosis'), `row/${shown}/diagnosis`)
  }
}

// Curves, the neighbourhood, suspects: what is clicked is opened
$('curves')?.addEventListener('click', async event => {
  const svg = event.target.closest('svg')
  if (!svg) return
  const { left, width } = svg.getBoundingClientRect(), [, , units] = svg.getAttribute('viewBox').split(' ')
  goTo(await ask('curve', `curve?at=${((event.clientX - left) / width * units - 52) / (units - 62)}`, answer => answer.json()))
})
$('injected')?.addEventListener('change', event => {
  for (const run of document.querySelectorAll('.run')) run.hidden = run.dataset.run !== (event.target.checked ? 'injected' : 'free')
  $('curves').dataset.run = event.target.checked ? 'injected' : 'free'
})
$('beside').onclick = event => goTo(event.target.closest('[data-number]')?.dataset.number)
const suspects = [...document.querySelectorAll('.suspect[data-number]')]
let suspect = -1
for (const button of suspects) button.onclick = () => goTo(button.dataset.number)

// Another second run, and what became of the files
async function change(path, more = '') {
  $('second').inert = true
  fail('Opening and comparing …', 'file')
  const answer = await fetch(`open${more}`, { method: 'POST', body: path }).catch(() => undefined)
  $('second').inert = false
  if (answer?.ok) location.reload()
  else fail(answer ? await answer.text() : 'The server does not answer.', 'file')
}
$('second').onsubmit = event => {
  event.preventDefault()
  if ($('second').path?.value) change($('second').path.value)
}
$('second').close?.addEventListener('click', () => change(''))
$('remarks').onclick = event => event.target.matches('.again') && change('', '?again=')
setInterval(async () => {
  if (document.hidden) return
  const state = await ask('state', 'state', answer => answer.json())
  if (state === undefined) return
  if (`${state.version}` !== root.dataset.version) return location.reload()
  const known = [...$('remarks').children].map(one => one.firstElementChild.textContent)
  if (known.join() !== state.remarks.join()) $('remarks').replaceChildren(...state.remarks.map(text => {
    const line = Object.assign(document.createElement('p'), { className: 'remark' })
    line.append(Object.assign(document.createElement('bdi'), { textContent: text }), ' ', Object.assign(document.createElement('button'), { className: 'again', textContent: 'Open again' }))
    return line
  }))
}, 3000)

// Keyboard
const STEPS = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: 20, PageUp: -20, Home: -Infinity, End: Infinity }
function turn(select) { // to the next option, after the last to the first
  if (!select) return
  select.selectedIndex = (select.selectedIndex + 1) % select.options.length
  choose()
}
const KEYS = {
  '/': () => choice.text.focus(),
  s: () => suspects.length && goTo(suspects[suspect = (suspect + 1) % suspects.length].dataset.number),
  r: async () => {
    await going // a suspect, behind which the next is meant
    await showRows()
    if (nextRed >= 0) select(nextRed)
  },
  o: () => turn(choice.sort),
  m: () => turn(choice.metric),
  t: () => $('tree-mode').click(),
  w: () => $('worst')?.click(),
  l: () => $('view')?.log?.click(),
  z: () => $('view') && showWhole(),
  i: () => $('injected')?.click(),
  d: () => $('diagnose')?.click(),
  v: () => $('text').querySelector('.side:not(.open)')?.click(),
  u: () => under(choice.under.value || ($('within').dataset.module ?? '')),
  '?': () => $('help').click(),
  ArrowLeft: () => $('source').scrollBy(-80, 0),
  ArrowRight: () => $('source').scrollBy(80, 0),
  p: () => {
    const panes = [inTree() ? tree : list, ...document.querySelectorAll('.pane')].filter(one => one.checkVisibility())
    panes[(panes.indexOf(document.activeElement.closest('.pane')) + 1 || 1) % panes.length].focus()
  },
}
const inTree = () => !tree.hidden
$('help').onclick = () => {
  $('keys').hidden = !$('keys').hidden
  $('help').ariaExpanded = `${!$('keys').hidden}`
}
onkeydown = event => {
  if (event.ctrlKey || event.altKey || event.metaKey) return
  if (event.target.matches('input:not([type=checkbox]), select')) {
    if (event.key === 'Escape' && event.target === choice.text) choose(choice.text.value = '')
    if (event.key === 'Escape' || (event.key === 'Enter' && !event.target.form.matches('#second'))) event.target.blur()
    return
  }
  if (event.key === 'Escape' && !$('keys').hidden) $('help').click()
  if (event.target.closest('.pane')?.matches(':focus-visible, :has(:focus-visible)') && /^(Arrow|Page|Home|End)/.test(event.key)) return // the browser scrolls
  if (inTree() && (event.key in STEPS || event.key.startsWith('Arrow'))) walkTree(event.key)
  else if (event.key in STEPS) select(undefined, STEPS[event.key])
  else if (event.key === 'Enter' && !event.target.matches('button, summary')) inTree() ? walkTree('ArrowRight') : select(Math.max(position, 0))
  else if (event.key in KEYS) KEYS[event.key]()
  else return
  event.preventDefault()
}
await choose()
root.dataset.ready = 'true'
