//! The litmus programs: first well-known shapes, then all variants of each family of shapes, then random programs.
//!
//! Invariant: the programs and their order never vary. A variant is dropped only if it equals an earlier program, has
//! a single outcome, or has more than [`OUTCOMES_MAX`] outcomes.

use std::collections::BTreeSet;

use super::program::Program;
use super::small;
use crate::random::Random;

/// Maximum number of outcomes of a program; programs with more are dropped.
const OUTCOMES_MAX: usize = 256;
/// Maximum number of points of the search for a program's outcomes.
const POINTS_MAX: usize = 8_000;
/// Number of random programs that are added.
const DRAWN: usize = 400;
/// Seed of the draws of the random programs.
const SEED: u64 = 0x6c69_746d_7573;

/// Returns over a thousand programs, the named shapes first. Takes about a second, since it enumerates the outcomes of
/// each program.
pub fn programs() -> Vec<Program> {
    shapes().all
}

/// Returns the whole suite: the programs of [`programs`], then all small programs that these do not contain. Takes a
/// few seconds.
pub fn suite() -> Vec<Program> {
    let mut programs = shapes();
    for (name, text) in small::texts() {
        programs.add(name, &text);
    }
    programs.all
}

fn shapes() -> Programs {
    let mut programs = Programs::default();
    for (name, text) in NAMED {
        programs.add(name, text);
    }
    message_passing(&mut programs);
    two_and_two(&mut programs);
    coherence(&mut programs);
    atomics_and_writes(&mut programs);
    torn(&mut programs);
    locks(&mut programs);
    three(&mut programs);
    drawn(&mut programs);
    masked(&mut programs);
    programs
}

/// Name and text of each well-known shape.
const NAMED: [(&str, &str); 48] = [
    ("message passing", "A: WRITE x=1; WRITE y=1 | B: READ y; wait READ x"),
    ("message passing, overlapped reads", "A: WRITE x=1; WRITE y=1 | B: READ y; READ x"),
    ("message passing, fenced read", "A: WRITE x=1; WRITE y=1 | B: READ y; fence READ x"),
    ("message passing, flag by CAS", "A: WRITE x=1; CAS y[0] 0->1 | B: READ y[0]; wait READ x"),
    ("message passing, flag by FAA", "A: WRITE x=1; FAA y[0]+1 | B: READ y[0]; wait READ x"),
    ("message passing, flag read by FAA", "A: WRITE x=1; WRITE y[0]=1 | B: FAA y[0]+0; READ x"),
    ("message passing in one WRITE", "A: WRITE x-y=1 | B: READ y; wait READ x"),
    ("message passing in one WRITE, backwards", "A: WRITE x-y=1 | B: READ x; wait READ y"),
    ("store buffering", "A: WRITE x=1; READ y | B: WRITE y=1; READ x"),
    ("store buffering by atomics", "A: FAA x[0]+1; READ y[0] | B: FAA y[0]+1; READ x[0]"),
    ("load buffering", "A: READ x; WRITE y=1 | B: READ y; WRITE x=1"),
    ("load buffering, fenced", "A: READ x; fence WRITE y=1 | B: READ y; fence WRITE x=1"),
    ("load buffering, waiting", "A: READ x; wait WRITE y=1 | B: READ y; wait WRITE x=1"),
    ("coherence of one writer", "A: WRITE x=1; WRITE x=2 | B: READ x; wait READ x"),
    ("coherence, overlapped reads", "A: WRITE x=1; WRITE x=2 | B: READ x; READ x"),
    ("coherence of two writers", "A: WRITE x=1 | B: WRITE x=2 | C: READ x; wait READ x"),
    ("one's own write", "A: WRITE x=1; READ x; WRITE x=2 | B: WRITE x=3"),
    ("write to read causality", "A: WRITE x=1 | B: READ x; wait WRITE y=1 | C: READ y; wait READ x"),
    (
        "two readers of two writes",
        "A: WRITE x=1; WRITE y=1 | B: READ x; wait READ y | C: READ y; wait READ x",
    ),
    ("independent reads, one writer apart", "A: WRITE x=1 | B: WRITE y=1; READ x | C: READ x; wait READ y"),
    ("2 + 2 writes", "A: WRITE x=1; WRITE y=2 | B: WRITE y=1; WRITE x=2"),
    ("a line is whole", "A: WRITE x=1; WRITE x=2 | B: READ x"),
    ("torn read of two lines", "A: WRITE x-y=1 | B: READ x-y"),
    ("torn read of three lines", "A: WRITE x-z=1 | B: READ x-z"),
    ("torn read of two writes", "A: WRITE x-z=1; WRITE x-z=2 | B: READ x-z"),
    ("two writers of three lines", "A: WRITE x-z=1 | B: WRITE x-z=2 | C: READ x-z"),
    ("unaligned words", "A: WRITE x[7]-y[0]=1 | B: READ x[7]-y[0]"),
    ("header and footer versions", "A: WRITE x[0]=1; WRITE x[1]-z[6]=1; WRITE z[7]=1 | B: READ x-z"),
    ("version in every line", "A: WRITE x-z=1 | B: READ x-z; wait READ x[0]"),
    ("naive version in the header", "A: WRITE x[0]=1,x[1]-y=1; FAA x[1]-1 | B: READ x-y; wait READ x[0]"),
    (
        "two ordered reads",
        "{x[1]=1} A: WRITE x[0]=1,x[1]=1,x[2]-y=1; FAA x[1]-1 | B: READ x[0-1]; wait READ y; wait READ x[0-1]",
    ),
    (
        "two ordered reads, overlapped",
        "{x[1]=1} A: WRITE x[0]=1,x[1]=1,x[2]-y=1; FAA x[1]-1 | B: READ x[0-1]; READ y; wait READ x[0-1]",
    ),
    ("lock and speculative read", "{x[0]=1} A: WRITE y=1; FAA x[0]-1 | B: CAS x[0] 0->1; READ y"),
    ("lock, then read", "{x[0]=1} A: WRITE y=1; FAA x[0]-1 | B: CAS x[0] 0->1; wait READ y"),
    ("read, overlapped by its lock", "{x[0]=1} A: WRITE y=1; FAA x[0]-1 | B: READ y; CAS x[0] 0->1"),
    ("unlock by WRITE", "{x[0]=1} A: WRITE y=1; WRITE x[0]=0 | B: CAS x[0] 0->1; READ y"),
    ("unlock with the data", "{y[7]=1} A: WRITE x-y[6]=1,y[7]=0 | B: CAS y[7] 0->1; READ x-y[6]"),
    ("unlock with the data, lock first", "{x[0]=1} A: WRITE x[0]=0,x[1]-y=1 | B: CAS x[0] 0->1; READ x[1]-y"),
    ("unlock by WRITE under FAA", "{x[0]=1} A: WRITE x[0]=0; READ x[0] | B: FAA x[0]+2; FAA x[0]-2"),
    (
        "two increments under a lock",
        "A: CAS x[0] 0->1; READ y; wait WRITE y=1; FAA x[0]-1 | B: CAS x[0] 0->1; READ y",
    ),
    ("FAA against WRITE", "A: FAA x[0]+1 | B: WRITE x[0]=5; READ x[0]"),
    ("FAA of nothing against WRITE", "A: FAA x[0]+0 | B: WRITE x[0]=5; READ x[0]"),
    ("CAS against WRITE", "A: CAS x[0] 0->1 | B: WRITE x[0]=5; READ x[0]"),
    ("failing CAS against WRITE", "A: CAS x[0] 7->1 | B: WRITE x[0]=5; READ x[0]"),
    ("FAA against FAA", "A: FAA x[0]+1; READ x[0] | B: FAA x[0]+2; READ x[0]"),
    ("one of two CAS", "A: CAS x[0] 0->1 | B: CAS x[0] 0->2 | C: CAS x[0] 0->3"),
    ("FAA under the WRITE of its line", "A: FAA x[0]+1; FAA x[0]+1 | B: WRITE x=5 | C: READ x"),
    ("atomics of two words", "A: CAS x[0] 0->1; CAS x[1] 0->1 | B: READ x[0-1]; READ x[0-1]"),
];

const STARTS: [&str; 3] = ["", "fence ", "wait "];

/// Adds programs in which one actor writes data and then a flag, and another reads the flag and then the data.
fn message_passing(programs: &mut Programs) {
    for (data, flag) in [("x", "y"), ("x-y", "z")] {
        let sets = [format!("WRITE {flag}=1"), format!("CAS {flag}[0] 0->1"), format!("FAA {flag}[0]+1")];
        let looks = [format!("READ {flag}[0]"), format!("FAA {flag}[0]+0"), format!("CAS {flag}[0] 1->2")];
        for set in &sets {
            for look in &looks {
                for start in STARTS {
                    let text = format!("A: WRITE {data}=1; {set} | B: {look}; {start}READ {data}");
                    programs.add("message passing", &text);
                    let text = format!("A: WRITE {data}=1; {set} | B: {look}; {start}WRITE {data}=2");
                    programs.add("flag, then overwrite", &text);
                    let text = format!("A: READ {data}; {start}{set} | B: {look}; wait WRITE {data}=1");
                    programs.add("read, then flag", &text);
                }
            }
        }
    }
}

/// Adds programs in which two actors access two places in opposite order.
fn two_and_two(programs: &mut Programs) {
    let kinds = |place: &str, value: u64| {
        [
            format!("READ {place}"),
            format!("WRITE {place}={value}"),
            format!("FAA {place}[0]+{value}"),
            format!("CAS {place}[0] 0->{value}"),
        ]
    };
    for first in kinds("x", 1) {
        for second in kinds("y", 2) {
            for third in kinds("y", 3) {
                for fourth in kinds("x", 4) {
                    for start in STARTS {
                        let text = format!("A: {first}; {start}{second} | B: {third}; {start}{fourth}");
                        programs.add("two places, two orders", &text);
                    }
                }
            }
        }
    }
}

/// Adds programs in which an actor reads one place twice.
fn coherence(programs: &mut Programs) {
    let writes = [
        "WRITE x=1; WRITE x=2",
        "WRITE x=1; FAA x[0]+1",
        "FAA x[0]+1; WRITE x[0]=3",
        "CAS x[0] 0->1; CAS x[0] 1->2",
    ];
    let looks = ["READ x", "READ x[0]", "FAA x[0]+0", "READ x-y"];
    for write in writes {
        for first in looks {
            for second in looks {
                for start in STARTS {
                    programs.add("coherence", &format!("A: {write} | B: {first}; {start}{second}"));
                }
            }
        }
    }
}

/// Adds programs in which WRITEs and atomics change one word.
fn atomics_and_writes(programs: &mut Programs) {
    let atomics = ["FAA x[0]+1", "FAA x[0]+0", "CAS x[0] 0->1", "CAS x[0] 5->1", "CAS x[0] 7->1"];
    let writes = ["WRITE x[0]=5", "WRITE x=5", "WRITE x[0-1]=5", "WRITE x-y=5", "WRITE x[7]-y[0]=5"];
    for atomic in atomics {
        for write in writes {
            for start in STARTS {
                programs.add("atomic and WRITE", &format!("A: {atomic} | B: {write}; {start}READ x[0]"));
                programs.add(
                    "atomic and WRITE",
                    &format!("A: {atomic}; {start}{write} | B: {atomic}; READ x[0-1]"),
                );
                programs
                    .add("atomic and WRITE", &format!("A: {write}; {atomic} | B: {atomic}; {start}{write}"));
            }
        }
        for other in atomics {
            for start in STARTS {
                programs.add(
                    "atomics of a word",
                    &format!("A: {atomic}; {start}{other} | B: {other}; {start}{atomic}"),
                );
            }
            programs
                .add("atomics of a word", &format!("A: {atomic} | B: {other} | C: WRITE x[0]=5; READ x[0]"));
        }
    }
}

/// Adds programs with concurrent WRITEs and READs of several lines.
fn torn(programs: &mut Programs) {
    let writes = [
        "WRITE x-y=1",
        "WRITE x-z=1",
        "WRITE x-y=1; WRITE x-y=2",
        "WRITE x=1; WRITE x-z=2",
        "WRITE x[0]=1; WRITE x[1]-z[6]=1; WRITE z[7]=1",
        "WRITE x[4]-z[3]=1",
        "READ z; WRITE x-z=1",
    ];
    let reads = [
        "READ x-y",
        "READ x-z",
        "READ y-z",
        "READ x[7]-y[0]",
        "READ x-y; READ y-z",
        "READ x-y; wait READ x-y",
        "READ x-z; fence READ x[0]",
    ];
    for write in writes {
        for read in reads {
            programs.add("torn read", &format!("A: {write} | B: {read}"));
            programs.add("torn read of two writers", &format!("A: {write} | B: WRITE x-y=7 | C: {read}"));
            programs.add("torn read and atomic", &format!("A: {write} | B: FAA y[0]+4 | C: {read}"));
        }
    }
}

/// Adds programs with a lock word and the data that the lock protects.
fn locks(programs: &mut Programs) {
    for (data, lock) in [("x", "y[0]"), ("x-y", "z[0]"), ("y", "x[0]"), ("y-z", "x[0]"), ("x[0-6]", "x[7]")] {
        let unlocks = [format!("FAA {lock}-1"), format!("WRITE {lock}=0"), format!("CAS {lock} 1->0")];
        for unlock in &unlocks {
            for take in [format!("CAS {lock} 0->1"), format!("FAA {lock}+1")] {
                for start in STARTS {
                    let held = format!("{{{lock}=1}} A: WRITE {data}=1; {start}{unlock}");
                    programs.add("unlock, then lock", &format!("{held} | B: {take}; READ {data}"));
                    programs.add("unlock, then lock", &format!("{held} | B: {take}; {start}WRITE {data}=2"));
                    programs.add("unlock, two lock", &format!("{held} | B: {take}; READ {data} | C: {take}"));
                }
            }
        }
    }
}

/// Adds programs with three actors.
fn three(programs: &mut Programs) {
    for one in STARTS {
        for other in STARTS {
            for write in ["WRITE", "FAA"] {
                let set = |place: &str| match write {
                    "WRITE" => format!("WRITE {place}=1"),
                    _ => format!("FAA {place}[0]+1"),
                };
                let (x, y, z) = (set("x"), set("y"), set("z"));
                programs.add(
                    "write to read causality",
                    &format!("A: {x} | B: READ x[0]; {one}{y} | C: READ y[0]; {other}READ x[0]"),
                );
                programs.add(
                    "two readers of two writes",
                    &format!("A: {x}; {y} | B: READ x[0]; {one}READ y[0] | C: READ y[0]; {other}READ x[0]"),
                );
                programs.add(
                    "independent reads, one writer apart",
                    &format!("A: {x} | B: {y}; {one}READ x[0] | C: READ x[0]; {other}READ y[0]"),
                );
                programs.add(
                    "three in a ring",
                    &format!("A: {x}; {one}{y} | B: {y}; {other}{z} | C: {z}; {one}{x}"),
                );
                programs.add(
                    "three load buffers",
                    &format!("A: READ x[0]; {one}{y} | B: READ y[0]; {other}{z} | C: READ z[0]; {one}{x}"),
                );
            }
        }
    }
}

/// Adds programs in which two or three actors execute random verbs on two or three lines.
fn drawn(programs: &mut Programs) {
    let random = Random::new(SEED);
    let below = |end: usize| random.below(end as u64) as usize;
    let places = ["x", "y", "x-y", "x-z", "y-z", "x[0]", "x[7]-y[0]", "y[0]", "x[0-1]"];
    let mut added = 0;
    while added < DRAWN {
        let actors = 2 + below(2);
        let mut value = 0;
        let mut texts = Vec::new();
        for actor in 0..actors {
            let steps = 1 + below(if actors == 2 { 4 } else { 2 });
            let mut verbs = Vec::new();
            for _ in 0..steps {
                value += 1;
                let place = places[below(places.len())];
                let word = ["x[0]", "y[0]"][below(2)];
                let start = if verbs.is_empty() { "" } else { ["", "", "fence ", "wait "][below(4)] };
                verbs.push(match below(6) {
                    0..2 => format!("{start}READ {place}"),
                    2..4 => format!("{start}WRITE {place}={value}"),
                    4 => format!("{start}FAA {word}+{}", value % 3),
                    _ => format!("{start}CAS {word} {}->{value}", below(3)),
                });
            }
            texts.push(format!("{}: {}", ["A", "B", "C"][actor], verbs.join("; ")));
        }
        added += usize::from(programs.add("drawn", &texts.join(" | ")));
    }
}

/// Adds programs with a CAS that compares and swaps some bits of a word, beside other changes of the word. Bits that
/// the CAS does not swap are written back, too, as it has fetched them.
fn masked(programs: &mut Programs) {
    let swaps = ["CAS x[0] 0->1 &1/1", "CAS x[0] 0->2 &1/2", "CAS x[0] 1->0 &1/3", "CAS x[0] 4->8 &4/12"];
    let others = ["WRITE x[0]=6", "WRITE x=6", "FAA x[0]+2", "CAS x[0] 0->1", "CAS x[0] 0->4 &2/4"];
    for swap in swaps {
        for other in others {
            for start in STARTS {
                programs.add("masked CAS", &format!("A: {swap} | B: {other}; {start}READ x[0]"));
                programs.add("masked CAS", &format!("A: {swap}; {start}{other} | B: {other}; {start}{swap}"));
                programs.add(
                    "masked CAS",
                    &format!("{{x[0]=5}} A: {swap}; READ x[0] | B: {other}; {start}{swap}"),
                );
            }
        }
    }
    for start in STARTS {
        // A lock bit beside data in the same word, as in the leaves of SMART.
        let held = format!("{{x[0]=1}} A: WRITE y=1; {start}CAS x[0] 1->0 &1/1");
        programs.add("unlock, then lock a bit", &format!("{held} | B: CAS x[0] 0->1 &1/1; READ y"));
        programs.add("lock a bit beside data", &format!("{held} | B: FAA x[0]+2; {start}CAS x[0] 0->1 &1/1"));
    }
}

#[derive(Default)]
struct Programs {
    all: Vec<Program>,
    /// Initial memory and sorted actors of all programs considered so far.
    seen: BTreeSet<(Vec<u64>, Vec<String>)>,
}

impl Programs {
    /// Adds a program unless it equals an earlier one, or has too few or too many outcomes. Returns whether it was
    /// added.
    fn add(&mut self, name: &str, text: &str) -> bool {
        let mut program: Program = text.parse().unwrap_or_else(|error| panic!("the shape '{text}': {error}"));
        program.name = name.into();
        let mut actors: Vec<String> = program.actors().iter().map(|steps| format!("{steps:?}")).collect();
        actors.sort();
        if !self.seen.insert((program.memory(), actors)) {
            return false;
        }
        let is_good = [false, true].into_iter().all(|relaxed| {
            let allowed = program.allowed_within(relaxed, POINTS_MAX);
            allowed.is_some_and(|allowed| (2..=OUTCOMES_MAX).contains(&allowed.len()))
        });
        if is_good {
            self.all.push(program);
        }
        is_good
    }
}
