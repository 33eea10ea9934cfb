//! Tests of the simulated NIC against the memory contract. For generated programs, the NIC's outcomes are exactly those
//! that the axioms allow, according to an enumerator that shares no code with the NIC.

use farside_sim::litmus::{self, Outcome, Program, Seeds, Start, Summary, WORD_SIZE};
use farside_sim::memory::Bytes;
use farside_sim::nic::{Completion, Nic, Timing, Verb};
use farside_sim::world::{SECONDS, World};
use std::cell::RefCell;
use std::rc::Rc;

/// Address, in the node's memory, of a program's first word.
const AT: u64 = 4 << 20;

/// Draws a timing under which every allowed reordering can occur. Also returns three bounds in nanoseconds; each actor
/// starts before one of these bounds.
fn timing(world: &World, relaxed: bool) -> (Timing, [u64; 3]) {
    let any = || [4, 60, 900][world.random().below(3) as usize];
    let ([flight, fetch, land], late) = match world.random().below(4) {
        // A READ takes about as long as a WRITE of several lines takes.
        0 => ([100, 250, 100], [4, 400, 3_000]),
        // Only landing and fetching take time, and all actors start together. So one line may land after two successive
        // READs, although all other lines of its WRITE have landed during the first READ.
        1 => ([4, 250, 250], [4, 60, 100]),
        _ => ([any(), any(), any()], [4, 400, 3_000]),
    };
    let timing = Timing {
        flight_ns: 0,
        flight_spread_ns: flight,
        service_ns: 0,
        fetch_ns: 0,
        fetch_spread_ns: fetch,
        land_spread_ns: land,
        atomic_ns: 0,
        slot_ns: 1,
        slot_spread_ns: any(),
        on_chip_ns: 0,
        slot_mask: 0xfff,
        relaxed,
    };
    (timing, late)
}

/// Runs programs one after the other on one memory.
struct Bench {
    bytes: Rc<Bytes>,
    relaxed: bool,
}

impl Bench {
    fn new(relaxed: bool) -> Bench {
        Bench { bytes: Rc::new(Bytes::new(8 << 20)), relaxed }
    }

    fn run(&self, program: &Program, seed: u64) -> Outcome {
        let world = World::new(seed);
        let start: Vec<u8> = program.memory().iter().flat_map(|word| word.to_le_bytes()).collect();
        self.bytes.poke(AT, &start);
        let (timing, late) = timing(&world, self.relaxed);
        let nic = Nic::new(&world, &self.bytes, timing);
        let answers: Vec<Rc<RefCell<Vec<Vec<u64>>>>> =
            program.actors().iter().map(|_| Rc::default()).collect();
        for (steps, answers) in program.actors().iter().zip(&answers) {
            let (connection, steps, answers) = (nic.connect(), steps.clone(), Rc::clone(answers));
            let process = world.start_process();
            let late = world.random().below(late[world.random().below(3) as usize]);
            let theirs = world.clone();
            world.spawn(process, async move {
                theirs.sleep(late).await;
                let mut posted: Vec<Completion> = Vec::new();
                for step in &steps {
                    if step.start == Start::Waits
                        && let Some(before) = posted.last()
                    {
                        before.complete().await;
                    }
                    posted.push(connection.post(verb(&step.op), step.start == Start::Fenced));
                }
                for completion in posted {
                    let answer = completion.done().await;
                    answers.borrow_mut().push(words(&answer));
                }
            });
        }
        world.run_until(SECONDS);
        let mut memory = vec![0; start.len()];
        self.bytes.peek(AT, &mut memory);
        world.end();
        let answers = answers.iter().flat_map(|answers| answers.take()).collect();
        Outcome { answers, memory: words(&memory) }
    }
}

fn verb(op: &litmus::Op) -> Verb {
    let at = AT + (op.at() * WORD_SIZE) as u64;
    match *op {
        litmus::Op::Read { words, .. } => Verb::Read { at, len: words * WORD_SIZE },
        litmus::Op::Write { .. } => {
            Verb::Write { at, bytes: op.payload().iter().flat_map(|word| word.to_le_bytes()).collect() }
        }
        litmus::Op::Cas { compare, swap, .. } => Verb::cas(at, compare, swap),
        litmus::Op::Faa { add, .. } => Verb::FetchAdd { at, add },
    }
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes
        .chunks_exact(8)
        .map(|word| u64::from_le_bytes(word.try_into().expect("a word has 8 bytes")))
        .collect()
}

fn hold_to_the_contract(relaxed: bool, seeds: Seeds) -> Summary {
    let bench = Bench::new(relaxed);
    let programs = litmus::programs();
    assert!(programs.len() >= 1_000, "{} programs", programs.len());
    let summary = litmus::compare_all(&programs, relaxed, seeds, |program, seed| bench.run(program, seed));
    summary.unwrap_or_else(|forbidden| panic!("{forbidden}"))
}

#[test]
fn no_forbidden_and_most_allowed_outcomes_occur() {
    for relaxed in [false, true] {
        let summary = hold_to_the_contract(relaxed, Seeds { at_least: 50, at_most: 1_500 });
        let reached = summary.allowed - summary.unreached.len();
        println!("relaxed {relaxed}: {} programs, {reached} of {}", summary.programs, summary.allowed);
        assert!(reached * 100 >= summary.allowed * 85, "{summary}");
    }
}

/// Every allowed outcome occurs. The rarest outcome of a program with dozens of outcomes occurs once in a million
/// runs.
#[test]
#[ignore = "takes minutes"]
fn soak_every_allowed_outcome_occurs() {
    for relaxed in [false, true] {
        let summary = hold_to_the_contract(relaxed, Seeds { at_least: 1_000, at_most: 10_000_000 });
        println!("relaxed {relaxed}: {summary}");
        assert!(summary.unreached.is_empty(), "{summary}");
    }
}
