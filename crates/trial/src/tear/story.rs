//! A run as numbered lines that people can follow, and as JSON.

use super::Protocol;
use super::layout::{lines, lines_text};
use super::schedule::{Event, Plan, Ran, What};
use super::truth::Kind;
use farside_sim::nic::Step;
use farside_sim::world::Nanos;
use serde::Serialize;
use std::fmt::Write;

/// A line of a story.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    /// Number of the line, from 1 on.
    pub number: usize,
    /// Virtual time in nanoseconds.
    pub time_ns: Nanos,
    /// The client: `writer 1`, `reader 2`.
    pub who: String,
    /// What happened: `begins`, `creates`, `read`, `land`, `fetch`, `write-back`, `again`, `completes` or `accepts`.
    pub what: &'static str,
    /// Numbers of the first and the last cache line accessed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lines: Option<(usize, usize)>,
    /// All of that in words, with the values.
    pub text: String,
}

/// Tells a run as lines. `accept` is the condition of the reader, as people write it.
pub fn tell<P: Protocol>(protocol: &P, accept: &str, plan: &Plan, ran: &Ran) -> Vec<Line> {
    let events = shown(ran);
    let line = |(index, event): (usize, &Event)| {
        let (what, lines, text) = words(protocol, accept, &plan.actors[event.actor].is_writer, &event.what);
        let who = name(plan, event.actor);
        Line { number: index + 1, time_ns: event.time, who, what, lines, text }
    };
    events.iter().enumerate().map(line).collect()
}

/// Events to show. If operations start again without end, the events up to the second time.
pub fn shown(ran: &Ran) -> &[Event] {
    if ran.finding.as_ref().is_none_or(|(_, finding)| finding.kind != Kind::Stuck) {
        return &ran.events;
    }
    let is_end = |event: &Event| matches!(event.what, What::Accepts | What::Completes);
    let from = ran.events.iter().rposition(is_end).map_or(0, |last| last + 1);
    let mut again: Vec<(usize, u32)> = Vec::new();
    for (index, event) in ran.events.iter().enumerate().skip(from) {
        let place = again.iter().position(|(actor, _)| *actor == event.actor).unwrap_or_else(|| {
            again.push((event.actor, 0));
            again.len() - 1
        });
        again[place].1 += u32::from(event.what == What::StartsAgain);
        if event.what == What::StartsAgain && again.iter().all(|(_, count)| *count >= 2) {
            return &ran.events[..=index];
        }
    }
    &ran.events
}

/// Name of a client.
pub fn name(plan: &Plan, actor: usize) -> String {
    let is_writer = plan.actors[actor].is_writer;
    let number = plan.actors[..=actor].iter().filter(|other| other.is_writer == is_writer).count();
    format!("{} {number}", if is_writer { "writer" } else { "reader" })
}

type Words = (&'static str, Option<(usize, usize)>, String);

fn words<P: Protocol>(protocol: &P, accept: &str, is_writer: &bool, what: &What) -> Words {
    match what {
        What::Begins { kind } if *is_writer => {
            ("begins", None, format!("begins '{}'", protocol.kinds()[*kind]))
        }
        What::Begins { .. } => ("begins", None, "begins a read".to_owned()),
        What::Creates { number } => ("creates", None, format!("creates write {number}, in its own copy")),
        What::Accesses { verb, step, bytes } => {
            let at = step.at() as usize;
            let range = at..at + bytes.len();
            let (what, does) = match step {
                Step::Fetch(_) => ("read", "reads"),
                Step::Land(_) => ("land", "writes"),
                Step::Lock(_) => ("fetch", "fetches the word in"),
                Step::WriteBack(_) => ("write-back", "writes the word back in"),
            };
            let value = protocol.describe(at, bytes);
            let colon = if value.is_empty() { "" } else { ": " };
            let text = format!("{verb} {does} {}{colon}{value}", lines_text(&range));
            (what, Some(lines(&range)), text)
        }
        What::StartsAgain => ("again", None, "starts again".to_owned()),
        What::Completes => ("completes", None, "all verbs of the operation have completed".to_owned()),
        What::Accepts if accept == "true" => ("accepts", None, "accepts".to_owned()),
        What::Accepts => ("accepts", None, format!("accepts, since {accept}")),
    }
}

/// Prints lines as a table.
pub fn table(lines: &[Line]) -> String {
    let numbers = lines.len().to_string().len();
    let times = lines.last().map_or(1, |line| line.time_ns.to_string().len());
    let mut out = String::new();
    for Line { number, time_ns, who, text, .. } in lines {
        writeln!(out, "{number:>numbers$}  {time_ns:>times$} ns  {who}  {text}")
            .expect("writing to a String cannot fail");
    }
    out
}
