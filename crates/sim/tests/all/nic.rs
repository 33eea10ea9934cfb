//! Tests of the simulated NIC against the memory contract. Generated programs run as chains over the fabric of verbs.
//! The outcomes are exactly those that the axioms allow, according to an enumerator that shares no code with the NIC.

use farside_remote::{
    Addr, ChainBuf, Fabric, Key, Mode, NodeId, Op, Reply, Status, cas, fetch_add, read, write,
};
use farside_sim::fabric::verbs::Verbs;
use farside_sim::hardware::PACKET_MAX;
use farside_sim::litmus::{self, Outcome, Program, Seeds, Start, Step, Summary, WORD_SIZE};
use farside_sim::memory::Bytes;
use farside_sim::nic::{Device, Nic, Timing};
use farside_sim::world::{SECONDS, World};
use std::cell::RefCell;
use std::rc::Rc;

/// Address, in the node's memory, of a program's first word.
const AT: Addr = Addr::new(4 << 20);
const KEY: Key = Key::new(1, 1);

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
        link_gbit: 0,
        op_ps: 0,
        lists_are_ops: false,
        packet_max: PACKET_MAX,
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
    /// Address of a program's first word, in the node's memory or in the NIC's.
    at: Addr,
}

impl Bench {
    fn new(relaxed: bool, at: Addr) -> Bench {
        Bench { bytes: Rc::new(Bytes::new(8 << 20)), relaxed, at }
    }

    fn run(&self, program: &Program, seed: u64) -> Outcome {
        let world = World::new(seed);
        let start: Vec<u8> = program.memory().iter().flat_map(|word| word.to_le_bytes()).collect();
        let (timing, late) = timing(&world, self.relaxed);
        let device = Device { timing, has_masked_cas: true, has_on_chip_words: true };
        let nic = Nic::new(&world, &self.bytes, timing);
        let (at, len) = (self.at, start.len());
        let is_on_chip = at.on_chip_offset().is_some();
        // Only the NIC itself reaches its own memory.
        let owner = Rc::new(Verbs::without_calls(&world, NodeId(0), nic.connect(), device));
        if is_on_chip {
            let owner = Rc::clone(&owner);
            world.complete(SECONDS, async move { run_one(&owner, write(at, &start)).await });
        } else {
            self.bytes.poke(at.raw(), &start);
        }
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
                    let results = run_list(&verbs, at, list).await;
                    answers.borrow_mut().extend(results);
                }
            });
        }
        world.run_until(SECONDS);
        let memory = if is_on_chip {
            world.complete(2 * SECONDS, async move { run_one(&owner, read(at, len as u32)).await })
        } else {
            let mut memory = vec![0; len];
            self.bytes.peek(at.raw(), &mut memory);
            Some(words(&memory))
        };
        world.end();
        let answers = answers.iter().flat_map(|answers| answers.take()).collect();
        Outcome { answers, memory: memory.expect("the NIC completes") }
    }
}

/// Runs a chain of one op, and returns its output.
async fn run_one<T: ?Sized>(verbs: &Verbs, op: Op<'_, T>) -> Vec<u64> {
    let (mut buf, mut reply) = (ChainBuf::new(), Reply::new());
    let mut chain = buf.begin(KEY);
    let _ = chain.also(op);
    verbs.run(NodeId(0), &chain, &mut reply).await.expect("the NIC executes every verb");
    words(reply.output(0))
}

/// Operands of the steps of a list.
enum Operands {
    None,
    Bytes(Vec<u8>),
    /// What to compare and to swap, then the masks of both.
    Swap([u64; 4]),
    Addend(zerocopy::little_endian::U64),
}

/// Runs steps as one chain, and returns their results.
async fn run_list(verbs: &Verbs, first: Addr, list: &[Step]) -> Vec<Vec<u64>> {
    let operands: Vec<Operands> = list
        .iter()
        .map(|step| match step.op {
            litmus::Op::Read { .. } => Operands::None,
            litmus::Op::Write { .. } => {
                Operands::Bytes(step.op.payload().iter().flat_map(|word| word.to_le_bytes()).collect())
            }
            litmus::Op::Cas { compare, swap, masks: [compared, swapped], .. } => {
                Operands::Swap([compare, swap, compared, swapped])
            }
            litmus::Op::Faa { add, .. } => Operands::Addend(add.into()),
        })
        .collect();
    let (mut buf, mut reply) = (ChainBuf::new(), Reply::new());
    let mut chain = buf.begin(KEY);
    for (step, operands) in list.iter().zip(&operands) {
        let at = Addr::new(first.raw() + (step.op.at() * WORD_SIZE) as u64);
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
            Operands::Swap([compare, swap, u64::MAX, u64::MAX]) => add!(cas(Mode::Eq, at, compare, swap)),
            Operands::Swap([compare, swap, compared, swapped]) => {
                add!(cas(Mode::Eq, at, compare, swap).masked(compared, swapped));
            }
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

fn hold_to_the_contract(programs: &[Program], relaxed: bool, at: Addr, seeds: Seeds) -> Summary {
    let bench = Bench::new(relaxed, at);
    let summary = litmus::compare_all(programs, relaxed, seeds, |program, seed| bench.run(program, seed));
    summary.unwrap_or_else(|forbidden| panic!("{forbidden}"))
}

#[track_caller]
fn reach_most(programs: &[Program], at: Addr, seeds: Seeds, percent: usize) {
    for relaxed in [false, true] {
        let summary = hold_to_the_contract(programs, relaxed, at, seeds);
        let reached = summary.allowed - summary.unreached.len();
        println!("relaxed {relaxed}: {} programs, {reached} of {}", summary.programs, summary.allowed);
        assert!(reached * 100 >= summary.allowed * percent, "{summary}");
    }
}

#[test]
fn no_forbidden_and_most_allowed_outcomes_occur() {
    let programs = litmus::programs();
    assert!(programs.len() >= 1_000, "{} programs", programs.len());
    reach_most(&programs, AT, Seeds { at_least: 50, at_most: 1_000 }, 80);
}

/// One in this many programs of the suite is in the sample that every run of the tests checks.
const SAMPLED_ONE_IN: usize = 16;
/// One in this many programs of known shapes also runs on words of the NIC.
const ON_CHIP_ONE_IN: usize = 8;

#[test]
fn a_sample_of_the_small_programs_has_no_forbidden_and_most_allowed_outcomes() {
    let (known, suite) = (litmus::programs().len(), litmus::suite());
    println!("{} programs: {known} of known shapes, {} small", suite.len(), suite.len() - known);
    assert!(suite.len() >= 7_441, "{} programs", suite.len());
    let sample: Vec<Program> = suite.into_iter().skip(known).step_by(SAMPLED_ONE_IN).collect();
    reach_most(&sample, AT, Seeds { at_least: 50, at_most: 2_000 }, 95);
}

/// The contract holds for words in the NIC's own memory, too.
#[test]
fn words_of_the_nic_have_no_forbidden_and_most_allowed_outcomes() {
    let programs = litmus::programs();
    let sample: Vec<Program> = programs.into_iter().step_by(ON_CHIP_ONE_IN).collect();
    assert!(sample.len() >= 100 && sample.iter().any(|program| program.name() == "masked CAS"));
    reach_most(&sample, Addr::on_chip(0), Seeds { at_least: 50, at_most: 1_000 }, 80);
}

/// Every allowed outcome occurs. The rarest outcome of a program with dozens of outcomes occurs once in a million
/// runs.
#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_every_allowed_outcome_of_the_suite_occurs() {
    let suite = litmus::suite();
    for relaxed in [false, true] {
        let summary =
            hold_to_the_contract(&suite, relaxed, AT, Seeds { at_least: 1_000, at_most: 10_000_000 });
        println!("relaxed {relaxed}: {summary}");
        assert!(summary.unreached.is_empty(), "{summary}");
    }
}
