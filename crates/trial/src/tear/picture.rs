//! Drawing of a schedule, from top to bottom: each event in a row, with the content of the object's lines after it.
//!
//! Virtual time runs down, but not to scale. A line's cell has the numbers of the writes whose data the line has. The
//! lines that an event accesses are outlined.
//!
//! Invariant: the same run gives the same drawing, byte by byte.

use super::Protocol;
use super::layout::lines;
use super::schedule::{Plan, Ran, What};
use super::story::{self, Line};
use farside_sim::memory::LINE;
use farside_sim::nic::Step;
use farside_sim::picture::escaped;
use std::fmt::{self, Write};

const ROW: usize = 24;
/// Width of a letter in pixels, rounded up.
const LETTER: usize = 8;
/// Width in pixels of a line's cell.
const CELL: usize = 44;
/// Height in pixels above the rows.
const TOP: usize = 64;
/// Number of colours for the numbers of writes.
const COLOURS: u8 = 6;

const STYLE: &str = "\
text { font: 13px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: #1c2024 }
.page { fill: #ffffff } .head { font-weight: bold } .dim { fill: #5b6470 } .line { stroke: #c9d0d8 }
.writer { fill: #15803d } .reader { fill: #2563eb } .bad { fill: #b91c1c; font-weight: bold }
.w0 { fill: #e5e7eb } .w1 { fill: #bbf7d0 } .w2 { fill: #fde68a } .w3 { fill: #bfdbfe } .w4 { fill: #fbcfe8 }
.w5 { fill: #ddd6fe } .none { fill: none } .cell { stroke: #c9d0d8 } .touched { stroke: #1c2024; stroke-width: 2.5 }
@media (prefers-color-scheme: dark) {
text { fill: #e6e9ed } .page { fill: #14181d } .dim { fill: #97a1ad } .line, .cell { stroke: #3a424c }
.writer { fill: #5fd38a } .reader { fill: #7db0ff } .bad { fill: #ff7b72 }
.w0 { fill: #2b323a } .w1 { fill: #14532d } .w2 { fill: #713f12 } .w3 { fill: #1e3a8a } .w4 { fill: #831843 }
.w5 { fill: #4c1d95 } .touched { stroke: #e6e9ed } }
";

/// Draws the run as a self-contained SVG file, for light and dark pages. `accept` is the condition of the reader, as
/// people write it.
pub fn svg<P: Protocol>(protocol: &P, accept: &str, plan: &Plan, ran: &Ran) -> String {
    let mut out = String::new();
    draw(protocol, accept, plan, ran, &mut out).expect("writing to a String cannot fail");
    out
}

fn draw<P: Protocol>(protocol: &P, accept: &str, plan: &Plan, ran: &Ran, out: &mut String) -> fmt::Result {
    let (events, told) = (story::shown(ran), story::tell(protocol, accept, plan, ran));
    let shape = protocol.shape();
    let cells = lines(&(0..shape.start.len())).1 + 1;
    let times = told.last().map_or(1, |line| line.time_ns.to_string().len());
    let (numbers, whos) = (told.len().to_string().len(), "writer 1".len());
    let left = LETTER * (numbers + times + whos + 11);
    let words = told.iter().map(|line| line.text.chars().count()).max().unwrap_or(0);
    let ending = ran.finding.as_ref().map_or(String::new(), |(_, finding)| format!("So {}.", finding.text));
    let width = (left + cells * CELL + (words + 4) * LETTER).max((ending.chars().count() + 4) * LETTER);
    let height = TOP + (told.len() + 2) * ROW;
    let title = ran.finding.as_ref().map_or("nothing was found", |(_, finding)| finding.kind.sentence());
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" role=\"img\">\n<title>{}</title>\n<style>\n{STYLE}</style>",
        escaped(title)
    )?;
    writeln!(out, "<rect class=\"page\" width=\"{width}\" height=\"{height}\"/>")?;
    writeln!(out, "<text class=\"head\" x=\"{LETTER}\" y=\"24\">{}</text>", escaped(title))?;
    let heads = "<text class=\"dim\" x=\"";
    writeln!(out, "{heads}{left}\" y=\"{}\">lines of the object</text>", TOP - 26)?;
    for cell in 0..cells {
        writeln!(out, "{heads}{}\" y=\"{}\">{cell}</text>", left + cell * CELL + LETTER, TOP - 8)?;
    }
    let mut memory = shape.start.clone();
    for (row, (event, Line { number, time_ns, who, text, lines: touched, .. })) in
        events.iter().zip(&told).enumerate()
    {
        if let What::Accesses { step: step @ (Step::Land(_) | Step::WriteBack(_)), bytes, .. } = &event.what {
            let at = step.at() as usize;
            memory[at..at + bytes.len()].copy_from_slice(bytes);
        }
        let (y, class) =
            (TOP + row * ROW, if plan.actors[event.actor].is_writer { "writer" } else { "reader" });
        writeln!(
            out,
            "<text class=\"dim\" x=\"{LETTER}\" y=\"{0}\" xml:space=\"preserve\">{number:>numbers$}  \
             {time_ns:>times$} ns</text><text class=\"{class}\" x=\"{1}\" y=\"{0}\">{who}</text>",
            y + 16,
            LETTER * (numbers + times + 8)
        )?;
        for cell in 0..cells {
            let content = content(&memory, &shape.data, cell);
            let colour = match content.as_slice() {
                [] => "none".to_owned(),
                [first, ..] => format!("w{}", first % COLOURS),
            };
            let is_touched = touched.is_some_and(|(first, last)| (first..=last).contains(&cell));
            let border = if is_touched { "touched" } else { "cell" };
            let x = left + cell * CELL;
            writeln!(
                out,
                "<rect class=\"{colour} {border}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" rx=\"3\"/>\
                 <text class=\"dim\" x=\"{}\" y=\"{}\">{}</text>",
                x + 2,
                y + 2,
                CELL - 6,
                ROW - 5,
                x + LETTER,
                y + 16,
                content.iter().map(u8::to_string).collect::<Vec<_>>().join(",")
            )?;
        }
        let x = left + cells * CELL + LETTER;
        writeln!(out, "<text x=\"{x}\" y=\"{}\">{}</text>", y + 16, escaped(text))?;
    }
    let y = TOP + told.len() * ROW;
    writeln!(out, "<line class=\"line\" x1=\"0\" x2=\"{width}\" y1=\"{y}\" y2=\"{y}\"/>")?;
    writeln!(out, "<text class=\"bad\" x=\"{LETTER}\" y=\"{}\">{}</text>", y + 18, escaped(&ending))?;
    let note = "virtual ns, not to scale; a cell has the numbers of the writes whose data the line has after the event";
    writeln!(out, "<text class=\"dim\" x=\"{LETTER}\" y=\"{}\">{note}</text>\n</svg>", y + 18 + ROW)
}

/// Numbers of the writes whose data a line has, in the order of their first bytes.
fn content(memory: &[u8], data: &[std::ops::Range<usize>], line: usize) -> Vec<u8> {
    let size = LINE as usize;
    let mut numbers = Vec::new();
    for at in data.iter().cloned().flatten().filter(|at| at / size == line) {
        if !numbers.contains(&memory[at]) {
            numbers.push(memory[at]);
        }
    }
    numbers
}
