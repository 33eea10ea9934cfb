//! Small programs by systematic enumeration: two or three actors with one to three verbs on two lines.
//!
//! Invariant: no two programs are equal up to symmetry: the order of the actors, and the names of the two lines unless
//! a verb touches both. The names matter then, because a WRITE lands in the order of the addresses.

use std::collections::BTreeSet;

/// Line or lines that a verb touches.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    X,
    Y,
    Both,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Read,
    Write,
    Add,
    Swap,
}

/// A verb: how it starts (an index of [`STARTS`]), its kind and its place.
type Verb = (usize, Kind, Place);
type Actor = Vec<Verb>;

const STARTS: [&str; 3] = ["", "fence ", "wait "];
const KINDS: [Kind; 4] = [Kind::Read, Kind::Write, Kind::Add, Kind::Swap];
const LINES: [Place; 2] = [Place::X, Place::Y];

/// Returns the texts of all small programs, each with the name of its group. Some have a single outcome.
pub(super) fn texts() -> Vec<(&'static str, String)> {
    let single: Vec<(Kind, Place)> =
        KINDS.into_iter().flat_map(|kind| LINES.map(|place| (kind, place))).collect();
    let both = [(Kind::Read, Place::Both), (Kind::Write, Place::Both)];
    let all: Vec<(Kind, Place)> = single.iter().copied().chain(both).collect();
    let plain: Vec<(Kind, Place)> =
        single.iter().copied().filter(|(kind, _)| matches!(kind, Kind::Read | Kind::Write)).collect();
    let changes: Vec<(Kind, Place)> = all
        .iter()
        .copied()
        .filter(|(kind, place)| matches!(kind, Kind::Write | Kind::Add) || *place == Place::Both)
        .collect();
    let crossing: Vec<Actor> =
        actors(&single, 2).into_iter().filter(|verbs| verbs[0].2 != verbs[1].2).collect();
    let [one, two, three] = [actors(&all, 1), actors(&all, 2), actors(&plain, 3)];
    let changing = actors(&changes, 1);
    let mut seen = BTreeSet::new();
    let mut texts = Vec::new();
    for (name, of_actors) in [
        ("one verb each", vec![&one, &one]),
        ("one verb and two", vec![&one, &two]),
        ("two lines, two orders", vec![&crossing, &crossing]),
        ("one verb and three", vec![&one, &three]),
        ("three actors", vec![&one, &one, &one]),
        ("three actors, two lines", vec![&changing, &changing, &crossing]),
    ] {
        let mut programs: Vec<Vec<Actor>> = vec![Vec::new()];
        for choices in of_actors {
            let with = |program: &Vec<Actor>, actor: &Actor| [program.clone(), vec![actor.clone()]].concat();
            programs = programs
                .iter()
                .flat_map(|program| choices.iter().map(move |actor| with(program, actor)))
                .collect();
        }
        let canonical = programs.into_iter().map(canonical);
        texts.extend(
            canonical.filter(|program| seen.insert(program.clone())).map(|program| (name, text(&program))),
        );
    }
    texts
}

/// Returns all sequences of `len` verbs of these kinds and places.
fn actors(verbs: &[(Kind, Place)], len: usize) -> Vec<Actor> {
    let mut all: Vec<Actor> = vec![Vec::new()];
    for place in 0..len {
        let starts = if place == 0 { 0..1 } else { 0..STARTS.len() };
        let next = |actor: &Actor| -> Vec<Actor> {
            let verbs =
                starts.clone().flat_map(|start| verbs.iter().map(move |&(kind, at)| (start, kind, at)));
            verbs.map(|verb| [actor.clone(), vec![verb]].concat()).collect()
        };
        all = all.iter().flat_map(next).collect();
    }
    all
}

/// Returns the least of the programs that are equal to this one up to symmetry.
fn canonical(mut program: Vec<Actor>) -> Vec<Actor> {
    let is_spanning = program.iter().flatten().any(|(.., place)| *place == Place::Both);
    let renamed = |place: Place| match place {
        Place::X => Place::Y,
        Place::Y => Place::X,
        Place::Both => Place::Both,
    };
    let mut other: Vec<Actor> = program
        .iter()
        .map(|actor| actor.iter().map(|&(start, kind, place)| (start, kind, renamed(place))).collect())
        .collect();
    program.sort();
    other.sort();
    if is_spanning { program } else { program.min(other) }
}

/// Formats a program. Each verb that changes memory uses a value of its own.
fn text(program: &[Actor]) -> String {
    let mut value = 0;
    let mut actor = |(index, verbs): (usize, &Actor)| {
        let verbs: Vec<String> = verbs
            .iter()
            .map(|&(start, kind, place)| {
                value += 1;
                let start = STARTS[start];
                let (lines, word) = match place {
                    Place::X => ("x", "x[0]"),
                    Place::Y => ("y", "y[0]"),
                    Place::Both => ("x-y", ""),
                };
                match kind {
                    Kind::Read => format!("{start}READ {lines}"),
                    Kind::Write => format!("{start}WRITE {lines}={value}"),
                    Kind::Add => format!("{start}FAA {word}+{value}"),
                    Kind::Swap => format!("{start}CAS {word} 0->{value}"),
                }
            })
            .collect();
        format!("{}: {}", ["A", "B", "C"][index], verbs.join("; "))
    };
    program.iter().enumerate().map(&mut actor).collect::<Vec<_>>().join(" | ")
}
