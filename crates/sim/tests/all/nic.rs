//! Tests of the simulated NIC against the memory contract. Generated programs run as chains over the fabric of verbs.
//! The outcomes are exactly those that the axioms allow, according to an enumerator that shares no code with the NIC.

use farside_remote::{Addr, ChainBuf, Fabric, Key, Mode, NodeId, Reply, Status, cas, fetch_add, read, write};
use farside_sim::fabric::verbs::Verbs;
use farside_sim::litmus::{self, Outcome, Program, Seeds, Start, Step, Summary, WORD_SIZE};
use farside_sim::memory::Bytes;
use farside_sim::nic::{Device, Nic, Timing};
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
        let device = Device { timing, has_masked_cas: false, has_on_chip_words: false };
        let nic = Nic::new(&world, &self.bytes, timing);
        let answers: Vec<Rc<RefCell<Vec<Vec<u64>>>>> =
            program.actors().iter().map(|_| Rc::default()).collect();
        for (steps, answers) in program.actors().iter().zip(&answers) {
            let verbs = Verbs::without_calls(&world, NodeId(0), nic.connect(), device);
            let (steps, answers) = (steps.clone(), Rc::clone(answers));
            let process = world.start_process();
            let late = world.random().below(late[world.random().below(3) as usize]);
            let theirs = world.clone();
            world.spawn(process, async move {
                theirs.sleep(late).await;
                // A step that waits begins another chain.
                for list in steps.chunk_by(|_, next| next.start != Start::Waits) {
                    let results = run_list(&verbs, list).await;
                    answers.borrow_mut().extend(results);
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

/// Operands of the steps of a list.
enum Operands {
    None,
    Bytes(Vec<u8>),
    Swap([u64; 2]),
    Addend(zerocopy::little_endian::U64),
}

/// Runs steps as one chain, and returns their results.
async fn run_list(verbs: &Verbs, list: &[Step]) -> Vec<Vec<u64>> {
    let operands: Vec<Operands> = list
        .iter()
        .map(|step| match step.op {
            litmus::Op::Read { .. } => Operands::None,
            litmus::Op::Write { .. } => {
                Operands::Bytes(step.op.payload().iter().flat_map(|word| word.to_le_bytes()).collect())
            }
            litmus::Op::Cas { compare, swap, .. } => Operands::Swap([compare, swap]),
            litmus::Op::Faa { add, .. } => Operands::Addend(add.into()),
        })
        .collect();
    let (mut buf, mut reply) = (ChainBuf::new(), Reply::new());
    let mut chain = buf.begin(Key::new(1, 1));
    for (step, operands) in list.iter().zip(&operands) {
        let at = Addr::new(AT + (step.op.at() * WORD_SIZE) as u64);
        let is_fenced = step.start == Start::Fenced;
        macro_rules! add {
            ($op:expr) => {{
                let op = $op;
                let _ = chain.also(if is_fenced { op.fenced() } else { op });
            }};
        }
        match operands {
            Operands::None => add!(read(at, (step.op.words() * WORD_SIZE) as u32)),
            Operands::Bytes(bytes) => add!(write(at, bytes)),
            Operands::Swap([compare, swap]) => add!(cas(Mode::Eq, at, compare, swap)),
            Operands::Addend(addend) => add!(fetch_add(at, addend)),
        }
    }
    verbs.run(NodeId(0), &chain, &mut reply).await.expect("the NIC executes every verb");
    let results = reply.statuses().enumerate().map(|(index, status)| {
        assert!(matches!(status, Status::Ok | Status::CasFailed), "{status:?}");
        words(reply.output(index))
    });
    results.collect()
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes
        .chunks_exact(8)
        .map(|word| u64::from_le_bytes(word.try_into().expect("a word has 8 bytes")))
        .collect()
}

fn hold_to_the_contract(programs: &[Program], relaxed: bool, seeds: Seeds) -> Summary {
    let bench = Bench::new(relaxed);
    let summary = litmus::compare_all(programs, relaxed, seeds, |program, seed| bench.run(program, seed));
    summary.unwrap_or_else(|forbidden| panic!("{forbidden}"))
}

#[track_caller]
fn reach_most(programs: &[Program], seeds: Seeds, percent: usize) {
    for relaxed in [false, true] {
        let summary = hold_to_the_contract(programs, relaxed, seeds);
        let reached = summary.allowed - summary.unreached.len();
        println!("relaxed {relaxed}: {} programs, {reached} of {}", summary.programs, summary.allowed);
        assert!(reached * 100 >= summary.allowed * percent, "{summary}");
    }
}

#[test]
fn no_forbidden_and_most_allowed_outcomes_occur() {
    let programs = litmus::programs();
    assert!(programs.len() >= 1_000, "{} programs", programs.len());
    reach_most(&programs, Seeds { at_least: 50, at_most: 1_000 }, 80);
}

/// One in this many programs of the suite is in the sample that every run of the tests checks.
const SAMPLED_ONE_IN: usize = 16;

#[test]
fn a_sample_of_the_small_programs_has_no_forbidden_and_most_allowed_outcomes() {
    let (known, suite) = (litmus::programs().len(), litmus::suite());
    println!("{} programs: {known} of known shapes, {} small", suite.len(), suite.len() - known);
    assert!(suite.len() >= 7_441, "{} programs", suite.len());
    let sample: Vec<Program> = suite.into_iter().skip(known).step_by(SAMPLED_ONE_IN).collect();
    reach_most(&sample, Seeds { at_least: 50, at_most: 2_000 }, 95);
}

/// Every allowed outcome occurs. The rarest outcome of a program with dozens of outcomes occurs once in a million
/// runs.
#[test]
#[ignore = "takes minutes"]
fn soak_every_allowed_outcome_of_the_suite_occurs() {
    let suite = litmus::suite();
    for relaxed in [false, true] {
        let summary = hold_to_the_contract(&suite, relaxed, Seeds { at_least: 1_000, at_most: 10_000_000 });
        println!("relaxed {relaxed}: {summary}");
        assert!(summary.unreached.is_empty(), "{summary}");
    }
}
