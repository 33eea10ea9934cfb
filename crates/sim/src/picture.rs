//! Drawing of a violation. Each operation is a bar from its call to its return; the bars of a client are in adjacent
//! rows.
//!
//! Virtual time runs to the right, but not to scale: events are drawn in order, as far apart as the labels of the bars
//! require. A bar that is open on the right is an operation without a return.
//!
//! Invariant: the same violation gives the same drawing, byte by byte.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use crate::checker::Violation;
use crate::history::{Ask, Operation, Outcome};

/// Horizontal extent of an operation's bar, in units that the caller of `layout` chooses, and the bar's row.
struct Bar {
    from: usize,
    to: usize,
    row: usize,
}

/// Bars of all operations, clients of all rows, and positions of all events.
struct Layout {
    bars: Vec<Bar>,
    /// The number of the client that each row belongs to.
    rows: Vec<u32>,
    width: usize,
    /// For each event, its horizontal position and its virtual time in nanoseconds.
    events: Vec<(usize, u64)>,
}

/// Returns the label of an operation's bar: the operation and its outcome.
fn label<A: Ask>(operation: &Operation<A>) -> String {
    match operation.returned {
        Some(_) => operation.to_string(),
        None => format!("{} -> ?", operation.ask),
    }
}

/// Places bars so that each label fits, with `gap` between events. `room` returns the width of a label, in the same
/// units as `gap`.
fn layout<A: Ask>(violation: &Violation<A>, gap: usize, room: impl Fn(&str) -> usize) -> Layout {
    let operations = &violation.operations;
    let mut events: BTreeMap<u64, (usize, bool, u64)> = BTreeMap::new();
    for (at, operation) in operations.iter().enumerate() {
        events.insert(operation.called.index, (at, false, operation.called.ns));
        if let Some(returned) = operation.returned {
            events.insert(returned.index, (at, true, returned.ns));
        }
    }
    let mut bars: Vec<Bar> = operations.iter().map(|_| Bar { from: 0, to: 0, row: 0 }).collect();
    let (mut x, mut places) = (0, Vec::new());
    for &(at, is_return, ns) in events.values() {
        x += gap;
        if is_return {
            x = x.max(bars[at].from + room(&label(&operations[at])));
            bars[at].to = x;
        } else {
            bars[at].from = x;
        }
        places.push((x, ns));
    }
    let is_open = |at: usize| operations[at].returned.is_none();
    let ends =
        (0..bars.len()).filter(|&at| is_open(at)).map(|at| bars[at].from + room(&label(&operations[at])));
    let width = ends.chain([x + gap]).max().unwrap_or(0);
    (0..bars.len()).filter(|&at| is_open(at)).for_each(|at| bars[at].to = width);

    let mut rows: Vec<(u32, usize)> = Vec::new();
    let mut order: Vec<usize> = (0..bars.len()).collect();
    // The rows of a client are adjacent. Bars that overlap get separate rows.
    order.sort_by_key(|&at| (operations[at].client, operations[at].called.index));
    for at in order {
        let client = operations[at].client;
        let free = rows.iter().position(|&(owner, end)| owner == client && end <= bars[at].from);
        let row = free.unwrap_or_else(|| {
            rows.push((client, 0));
            rows.len() - 1
        });
        rows[row].1 = bars[at].to;
        bars[at].row = row;
    }
    Layout { bars, rows: rows.into_iter().map(|(client, _)| client).collect(), width, events: places }
}

/// Describes the violation in one line.
fn headline<A: Ask>(violation: &Violation<A>) -> String {
    let Violation { what, operations, offender, instead, of } = violation;
    let Operation { client, ask, outcome, .. } = &operations[*offender];
    let mut text = format!("{what}: '{ask}' of client {client} returned '{outcome}'");
    if !instead.is_empty() {
        let others: Vec<String> = instead.iter().map(A::Outcome::to_string).collect();
        text += &format!(", expected {}", others.join(" or "));
    }
    text + &format!(" ({} of {of} operations shown)", operations.len())
}

/// Maximum width of the drawn bars, in columns of a terminal.
const COLUMNS_MAX: usize = 64;

/// Draws the violation for a terminal: a line for each operation, in the order of the calls.
pub fn text<A: Ask>(violation: &Violation<A>) -> String {
    let operations = &violation.operations;
    let Layout { bars, width, .. } = layout(violation, 2, |_| 3);
    let scale = |x: usize| if width > COLUMNS_MAX { x * COLUMNS_MAX / width } else { x };
    let labels: Vec<String> = operations.iter().map(label).collect();
    let label_width = labels.iter().map(String::len).max().unwrap_or(0);
    let ns_width =
        operations.iter().map(|operation| digits(operation.returned.unwrap_or(operation.called).ns)).max();
    let ns_width = ns_width.unwrap_or(0);
    let mut out = headline(violation) + "\n";
    for (at, (operation, bar)) in operations.iter().zip(&bars).enumerate() {
        let (from, to) = (scale(bar.from), scale(bar.to).max(scale(bar.from) + 2));
        let end = if operation.returned.is_some() { '|' } else { '>' };
        let bar = format!("{}|{}{end}", " ".repeat(from), "-".repeat(to - from - 1));
        let mark = if at == violation.offender { '!' } else { ' ' };
        let returned = operation.returned.map_or("?".into(), |returned| returned.ns.to_string());
        let line = format!(
            "{mark} client {:<3} {:>ns_width$} to {returned:>ns_width$} ns  {:<label_width$}  {bar}",
            operation.client, operation.called.ns, labels[at],
        );
        out += line.trim_end();
        out.push('\n');
    }
    out
}

fn digits(number: u64) -> usize {
    number.to_string().len()
}

const ROW_HEIGHT: usize = 34;
const BAR_HEIGHT: usize = 24;
/// Width in pixels of the column with the clients' names.
const LEFT: usize = 90;
/// Height of the headline in pixels.
const TOP: usize = 64;
/// Width of a letter in pixels, rounded up.
const LETTER: usize = 8;
/// Minimum distance, in letters, between two events that both show their time.
const TICK: usize = 9;

const STYLE: &str = "\
text { font: 13px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: #1c2024 }
.page { fill: #ffffff } .head { font-weight: bold } .dim { fill: #5b6470 } .line { stroke: #c9d0d8 }
.bar { stroke-width: 1.5 } .read { fill: #dbeafe; stroke: #2563eb } .write { fill: #dcfce7; stroke: #15803d }
.open { stroke-dasharray: 5 3 } .offender { fill: #fee2e2; stroke: #dc2626; stroke-width: 3 }
@media (prefers-color-scheme: dark) {
text { fill: #e6e9ed } .page { fill: #14181d } .dim { fill: #97a1ad } .line { stroke: #3a424c }
.read { fill: #172f55; stroke: #7db0ff } .write { fill: #143a24; stroke: #5fd38a }
.offender { fill: #571b1b; stroke: #ff7b72 } }
";

/// Draws the violation as a self-contained SVG file, for light and dark pages.
pub fn svg<A: Ask>(violation: &Violation<A>) -> String {
    let mut out = String::new();
    draw(violation, &mut out).expect("writing to a String cannot fail");
    out
}

fn draw<A: Ask>(violation: &Violation<A>, out: &mut String) -> fmt::Result {
    let Layout { bars, rows, width, events } =
        layout(violation, 2 * LETTER, |label| (label.chars().count() + 2) * LETTER);
    let headline = headline(violation);
    let (title, shown) = headline.split_once(": ").unwrap_or((&headline, ""));
    let last_tick = events.last().map_or(0, |(x, ns)| x + digits(*ns) * LETTER);
    let page_width = (LEFT + width.max(last_tick) + LETTER).max((shown.len().max(title.len()) + 2) * LETTER);
    let axis = TOP + rows.len() * ROW_HEIGHT;
    let page_height = axis + 48;
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{page_width}\" height=\"{page_height}\" \
         viewBox=\"0 0 {page_width} {page_height}\" role=\"img\">"
    )?;
    writeln!(out, "<title>{}</title>\n<style>\n{STYLE}</style>", escaped(&headline))?;
    writeln!(out, "<rect class=\"page\" width=\"{page_width}\" height=\"{page_height}\"/>")?;
    writeln!(out, "<text class=\"head\" x=\"{LETTER}\" y=\"24\">{}</text>", escaped(title))?;
    writeln!(out, "<text x=\"{LETTER}\" y=\"44\">{}</text>", escaped(shown))?;

    for (row, client) in rows.iter().enumerate() {
        let y = TOP + row * ROW_HEIGHT;
        if row == 0 || rows[row - 1] != *client {
            writeln!(out, "<line class=\"line\" x1=\"0\" x2=\"{page_width}\" y1=\"{y}\" y2=\"{y}\"/>")?;
            writeln!(out, "<text class=\"dim\" x=\"{LETTER}\" y=\"{}\">client {client}</text>", y + 22)?;
        }
    }
    for (at, (operation, bar)) in violation.operations.iter().zip(&bars).enumerate() {
        let (x, y) = (LEFT + bar.from, TOP + bar.row * ROW_HEIGHT + (ROW_HEIGHT - BAR_HEIGHT) / 2);
        let changes = !operation.ask.is_read();
        let mut class = if changes { "bar write" } else { "bar read" }.to_owned();
        if operation.outcome == A::Outcome::UNKNOWN {
            class += " open";
        }
        if at == violation.offender {
            class += " offender";
        }
        let returned =
            operation.returned.map_or("no return".into(), |returned| format!("{} ns", returned.ns));
        writeln!(
            out,
            "<g><title>client {}: {}, {} ns to {returned}</title>\
             <rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{BAR_HEIGHT}\" rx=\"3\"/>\
             <text x=\"{}\" y=\"{}\">{}</text></g>",
            operation.client,
            escaped(&operation.to_string()),
            operation.called.ns,
            bar.to - bar.from,
            x + LETTER,
            y + 16,
            escaped(&label(operation)),
        )?;
    }

    writeln!(out, "<line class=\"line\" x1=\"{LEFT}\" x2=\"{page_width}\" y1=\"{axis}\" y2=\"{axis}\"/>")?;
    let mut free = 0;
    for (x, ns) in events {
        writeln!(
            out,
            "<line class=\"line\" x1=\"{0}\" x2=\"{0}\" y1=\"{axis}\" y2=\"{1}\"/>",
            LEFT + x,
            axis + 5
        )?;
        if x >= free {
            writeln!(out, "<text class=\"dim\" x=\"{}\" y=\"{}\">{ns}</text>", LEFT + x, axis + 20)?;
            free = x + TICK.max(digits(ns) + 1) * LETTER;
        }
    }
    let note = "virtual ns, not to scale; dashed: may have been carried out at any later time, or never";
    writeln!(out, "<text class=\"dim\" x=\"{LETTER}\" y=\"{}\">{note}</text>\n</svg>", axis + 40)
}

/// Escapes text for SVG and HTML.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
