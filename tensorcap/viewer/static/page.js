// The server draws and decides; this script only scrolls, points and asks.
const $ = id => document.getElementById(id)
const [choice, list, rows, tree, inspector] = ['choice', 'navigator', 'rows', 'tree', 'inspector'].map($)
const root = document.documentElement
const HEIGHT = 22, MARGIN = 60, PATIENCE = 90 // of a row; rows around what is seen; ms before charts are asked for
const pen = document.createElement('canvas').getContext('2d') // for the width of a letter

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
// What an answer said of another file, or a key of itself, stays, whatever else is answered meanwhile.
function fail(text, of = 'page') {
  if (text || fail.of === of) Object.assign($('failure'), { hidden: !text, textContent: text })
  if (text) fail.of = of
}
const query = form => new URLSearchParams(new FormData(form))
// What has the focus keeps it if there is such a thing in what takes its place.
function replace(place, html) {
  const { id } = document.activeElement
  place.innerHTML = html
  if (id && document.activeElement.id !== id) $(id)?.focus({ preventScroll: true })
}
async function put(purpose, place, url) {
  const html = await ask(purpose, url)
  if (html !== undefined && place.isConnected) replace(place, html)
}

// Navigator: a window of rows around what is seen
let position = -1, total = 0, seen = 0, wanted = false, reordered = false, shown = '', nextRed = -1, arriving
async function showRows() {
  const first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - MARGIN)
  const count = Math.ceil(list.clientHeight / HEIGHT) + 2 * MARGIN
  const around = reordered ? `&around=${shown}` : ''
  pen.font = getComputedStyle(rows).font
  const width = Math.floor((list.clientWidth - 27) / pen.measureText('0').width) // of a row without its dot, in letters
  const html = await ask('rows', `rows?${query(choice)}&first=${first}&count=${count}&width=${width}&after=${position}${around}`)
  if (html === undefined) return false
  rows.innerHTML = html
  const part = rows.firstElementChild
  part.style.top = `${part.dataset.first * HEIGHT}px`
  total = +part.dataset.total
  nextRed = +part.dataset.red
  rows.style.height = `${total * HEIGHT}px`
  for (const said of rows.querySelectorAll('[data-for]')) {
    replace($(said.dataset.for), said.innerHTML)
    said.remove()
  }
  if (reordered) {
    reordered = false
    position = +part.dataset.position
    seen = list.scrollTop = Math.max(0, position * HEIGHT - list.clientHeight / 2)
  }
  mark()
  return true
}
const rowAt = at => rows.firstElementChild?.children[at - rows.firstElementChild.dataset.first]
// Scrolling asks for rows, too, and the last request wins: whichever answer brings the selected row opens it.
function mark() {
  const { module } = $('within').dataset
  for (const row of document.querySelectorAll('.row')) {
    row.ariaSelected = row.dataset.number === shown ? 'true' : null
    row.classList.toggle('lit', !!module && row.dataset.module === module)
  }
  for (const one of document.querySelectorAll('#modules details')) one.classList.toggle('chosen', one.dataset.under === choice.under.value)
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
  remember()
  if (inTree()) showTree(true)
  return arriving = showRows()
}
function showAll() { // whatever was chosen
  for (const field of [choice.text, choice.status, choice.component]) if (field) field.value = ''
  choice.once.checked = false
  return under('')
}
// Something that is not in view, or not even in the list: open it, and go there; what hides it is chosen no more.
let going
const goTo = number => going = number === undefined || number === '' ? going : open(number).then(choose).then(done => done && position < 0 && showAll())
// The address has what is chosen and open, for when the page is loaded again.
const remember = () => history.replaceState(null, '', `#${query(choice)}&open${root.dataset.version}=${shown}`)
onresize = () => showRows()
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
choice.oninput = event => event.target.id === 'tree-mode' ? showTree(event.target.checked) : choose()
$('counts')?.addEventListener('click', event => {
  const status = event.target.closest('button')?.dataset.status
  if (status === undefined) return
  choice.status.value = choice.status.value === status ? '' : status
  choose()
})
function under(module) {
  choice.under.value = choice.under.value === module ? '' : module
  return choose()
}

// Modules: what is in one is asked for when it is opened; one that is clicked filters the list
async function fill(module, whole) {
  if (module.children.length > 1) return
  const html = await ask(`modules ${module.dataset.under}`, `modules?under=${encodeURIComponent(module.dataset.under)}${whole ? `&rows=&metric=${choice.metric?.value}` : ''}`)
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
  if (!on) return choose()
  const html = await ask('tree', `modules?under=&rows=&metric=${choice.metric?.value}&open=${encodeURIComponent($('within').dataset.module ?? '')}`)
  if (html === undefined) return
  tree.innerHTML = html
  mark()
  tree.querySelector('[aria-selected]')?.scrollIntoView({ block: 'center' })
}
tree.onclick = event => {
  const row = event.target.closest('.row')
  if (row) open(row.dataset.number)
}
function walkTree(key) { // from what has the focus, or is selected
  const visible = [...tree.querySelectorAll('.row, summary')].filter(one => one.checkVisibility())
  const here = tree.querySelector(':focus') ?? tree.querySelector('[aria-selected]')
  const module = here?.closest('details'), isModule = here?.matches('summary')
  let next
  if (key === 'ArrowRight' && isModule) module.open = true
  else if (key === 'ArrowLeft' && isModule && module.open) module.open = false
  else if (key === 'ArrowLeft') next = (isModule ? module.parentNode.closest('details') : module)?.firstElementChild
  else if (key in STEPS) next = visible[Math.min(Math.max(visible.indexOf(here) + STEPS[key], 0), visible.length - 1)]
  next?.focus()
  if (next?.matches('.row')) open(next.dataset.number)
}

// Inspector: all of one tensor, its maps, and the values below the pointer
let values
async function open(number) {
  shown = `${number}`
  remember()
  mark()
  const html = await ask('row', `row/${number}${$('view')?.log?.checked ? '?log=' : ''}`)
  if (html === undefined) return
  inspector.innerHTML = html
  inspector.scrollTop = 0
  if ($('view')) $('view').oninput = event => {
    if (event.target.name === 'rows' || event.target.name === 'columns') $('view').box.value = ''
    showMaps()
  }
  values = undefined
  pins()
  const { module, place } = $('shown').dataset
  for (const line of document.querySelectorAll('#curves .here')) line.setAttribute('d', place && `M${place},0V400`)
  $('within').dataset.module = module
  mark()
  $('scroll').scrollTop = 0
  clearTimeout(open.later)
  open.later = setTimeout(() => showBeside(number), PATIENCE) // a reader who walks on does not wait for it
}
async function showBeside(number) {
  await Promise.all([
    put('beside', $('beside'), `row/${number}/beside?side=${showSource.side ?? ''}`),
    showSource(),
    $('view') && put('charts', $('charts'), `row/${number}/charts`),
  ])
}
async function showSource(more = '') {
  await put('source', $('text'), `row/${shown}/source?side=${showSource.side ?? ''}${more}`)
  const line = $('text').querySelector('.hll'), box = $('code')
  if (line) box.scrollTop = line.offsetTop - box.clientHeight / 2
}
const frame = () => $('text').querySelector(`[data-number="${shown}"] .crumb.open`) // none if the pane is of another tensor yet
$('text').onclick = event => {
  let { side, level } = event.target.closest('button')?.dataset ?? {}
  if (side) put('beside', $('beside'), `row/${shown}/beside?side=${showSource.side = side}`)
  if (side || level) showSource((level ??= frame()?.dataset.level) ? `&level=${level}` : '')
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
const goToPoint = async where => goTo(await ask('curve', `curve?${where}`, answer => answer.json()))
$('curves')?.addEventListener('click', event => {
  const svg = event.target.closest('svg')
  if (!svg) return
  const { left, width } = svg.getBoundingClientRect(), [, , units] = svg.getAttribute('viewBox').split(' ')
  goToPoint(`at=${((event.clientX - left) / width * units - 52) / (units - 62)}`)
})
const suspects = [...document.querySelectorAll('.suspect[data-number]')]
let suspect = -1
for (const box of document.querySelectorAll('.suspects, #beside')) box.onclick = event => {
  event.preventDefault()
  goTo(event.target.closest('[data-number]')?.dataset.number)
}

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
  if ($('remarks').dataset.known !== state.remarks.join()) put('remarks', $('remarks'), 'remarks')
  $('remarks').dataset.known = state.remarks.join()
}, 3000)

// Keyboard: the list of keys says what each one needs, and which are a click on that
const STEPS = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: 20, PageUp: -20, Home: -Infinity, End: Infinity }
function turn(select) { // to the next option, after the last to the first
  select.selectedIndex = (select.selectedIndex + 1) % select.options.length
  choose()
}
const inTree = () => !tree.hidden
function goToPane(step) {
  const panes = [inTree() ? tree : list, ...document.querySelectorAll('.pane')].filter(one => one.checkVisibility())
  const at = panes.findIndex(one => one.contains(document.activeElement))
  const next = panes[(Math.max(at, 0) + step + panes.length) % panes.length]
  ;(next.querySelector('[tabindex="0"]') ?? next).focus()
}
const KEYS = {
  '/': () => choice.text.select(),
  s: () => goTo(suspects[suspect = (suspect + 1) % suspects.length].dataset.number),
  r: async () => {
    await going // a suspect, behind which the next is meant
    await showRows()
    if (nextRed >= 0) select(nextRed)
  },
  o: () => turn(choice.sort),
  m: () => turn(choice.metric),
  g: () => turn(choice.status),
  c: () => turn(choice.component),
  u: () => under(choice.under.value || ($('within').dataset.module ?? '')),
  f: () => frame()?.previousElementSibling?.click(),
  F: () => frame()?.nextElementSibling?.click(),
  ArrowLeft: () => $('code').scrollBy(-80, 0),
  ArrowRight: () => $('code').scrollBy(80, 0),
  p: () => goToPane(1),
  P: () => goToPane(-1),
  Escape: event => event.target.closest('.pane') ? (inTree() ? tree : list).focus() : showAll(),
}
const needed = key => document.querySelector(key.dataset.needs ?? 'html')
$('help').onclick = () => {
  for (const key of $('keys').querySelectorAll('[data-needs]')) key.classList.toggle('dead', !needed(key))
  $('keys').showModal()
}
onkeydown = event => {
  if (event.ctrlKey || event.altKey || event.metaKey) return
  if ($('keys').open) return void (event.key === '?' && $('keys').close())
  if (event.target.matches('input:not([type=checkbox]), select')) {
    if (event.key === 'Escape' && event.target === choice.text) choose(choice.text.value = '')
    if (event.key === 'Escape' || (event.key === 'Enter' && !event.target.form.matches('#second'))) event.target.blur()
    return
  }
  if (event.target.id === 'curves' && /Left|Right/.test(event.key)) return goToPoint(`from=${shown || 0}&step=${event.key === 'ArrowLeft' ? -1 : 1}`)
  if (event.target.closest('.pane')?.matches(':focus-visible, :has(:focus-visible)') && /^(Arrow|Page|Home|End)/.test(event.key)) return // the browser scrolls
  const key = $('keys').querySelector(`[data-key~="${CSS.escape(event.key)}"]`)
  fail('', 'key')
  if (key && !needed(key)) fail(key.dataset.without, 'key')
  else if (key?.matches('[data-pressed]')) needed(key).click()
  else if (inTree() && (event.key in STEPS || event.key.startsWith('Arrow'))) walkTree(event.key)
  else if (event.key in STEPS) select(undefined, STEPS[event.key])
  else if (event.key === 'Enter' && !inTree() && !event.target.matches('button, summary, a')) select(Math.max(position, 0))
  else if (event.key in KEYS) KEYS[event.key](event)
  else return
  event.preventDefault()
}
for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
  if (name === `open${root.dataset.version}`) shown = value
  else if (choice[name]) Object.assign(choice[name], { value, checked: true })
}
await choose()
if (shown) open(shown)
root.dataset.ready = 'true'
