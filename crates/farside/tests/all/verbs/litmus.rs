//! Litmus programs of two actors on the device: no outcome occurs that the contract of one-sided memory forbids.
//!
//! The programs are those on which the simulated NIC is held to the same contract ([`farside_sim::litmus`]). An actor
//! is a thread with a queue pair of its own; the device runs READ, WRITE and atomics. The memory is the table of a
//! store, which nobody else uses.

use super::{Atomic, node};
use farside::{NewStore, Pool};
use farside_fabrics::executor::block_on;
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::fabric::ServiceId;
use farside_remote::{
    Addr, ChainBuf, Fabric, Key, Mode, NodeId, Op, Reply, Status, cas, fetch_add, read, write,
};
use farside_sim::litmus::{self, Outcome, Program, Seeds, Start, Step, WORD_SIZE, compare};
use std::collections::BTreeMap;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

/// Time for all programs. The virtual machine runs few of them in it, a NIC all.
const TIME_MAX: Duration = Duration::from_secs(60);

/// Runs of a program.
const RUNS: Seeds = Seeds { at_least: 20, at_most: 60 };

const NODE: NodeId = NodeId(0);

/// An actor's session, with the key that the session got for the store.
struct Actor {
    endpoint: farside::parts::Endpoint,
    store: Store,
}

impl Actor {
    fn open(pool: &Pool) -> Actor {
        let endpoint = pool.endpoint_here().expect("a session");
        let request = serde_json::to_vec(&Ask::OpenStore { name: STORE.into() }).expect("plain data");
        let mut answer = Vec::new();
        block_on(&endpoint, endpoint.call(NODE, ServiceId::NODE, &request, &mut answer)).expect("answered");
        match serde_json::from_slice(&answer).expect("an answer") {
            Answer::Store(store) => Actor { endpoint, store },
            other => panic!("requested a store, got {other:?}"),
        }
    }

    /// Runs the steps of one actor, and returns their results.
    fn run(&self, steps: &[Step]) -> Vec<Vec<u64>> {
        // A step that waits begins another chain.
        steps.chunk_by(|_, next| next.start != Start::Waits).flat_map(|list| self.run_list(list)).collect()
    }

    /// Runs steps as one chain: one list of the queue pair.
    fn run_list(&self, list: &[Step]) -> Vec<Vec<u64>> {
        let operands: Vec<Operands> = list.iter().map(Operands::of).collect();
        let (mut buf, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buf.begin(self.key());
        for (step, operands) in list.iter().zip(&operands) {
            let at = Addr::new(self.first() + (step.op.at() * WORD_SIZE) as u64);
            let is_fenced = step.start == Start::Fenced;
            match operands {
                Operands::None => {
                    let _ = chain.also(fenced(read(at, (step.op.words() * WORD_SIZE) as u32), is_fenced));
                }
                Operands::Bytes(bytes) => {
                    let _ = chain.also(fenced(write(at, bytes), is_fenced));
                }
                Operands::Swap(compare, swap) => {
                    let _ = chain.also(fenced(cas(Mode::Eq, at, compare, swap), is_fenced));
                }
                Operands::Addend(addend) => {
                    let _ = chain.also(fenced(fetch_add(at, addend), is_fenced));
                }
            }
        }
        block_on(&self.endpoint, self.endpoint.run(NODE, &chain, &mut reply))
            .expect("the device runs every verb");
        let results = reply.statuses().enumerate().map(|(index, status)| {
            assert!(matches!(status, Status::Ok | Status::CasFailed), "{status:?}");
            words(reply.output(index))
        });
        results.collect()
    }

    /// Writes the words of the program's memory.
    fn set(&self, memory: &[u64]) {
        let bytes: Vec<u8> = memory.iter().flat_map(|word| word.to_le_bytes()).collect();
        let (mut buf, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buf.begin(self.key());
        let written = chain.also(write(Addr::new(self.first()), &bytes));
        block_on(&self.endpoint, self.endpoint.run(NODE, &chain, &mut reply)).expect("written");
        assert_eq!(reply.status(written), Status::Ok);
    }

    /// Reads the first `count` words of the program's memory.
    fn memory(&self, count: usize) -> Vec<u64> {
        let (mut buf, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buf.begin(self.key());
        let got = chain.also(read(Addr::new(self.first()), (count * WORD_SIZE) as u32));
        block_on(&self.endpoint, self.endpoint.run(NODE, &chain, &mut reply)).expect("read");
        words(reply.get(got).expect("allowed"))
    }

    fn key(&self) -> Key {
        Key::new(self.store.region, self.store.secret)
    }

    /// Address of the program's first word: a cache line.
    fn first(&self) -> u64 {
        self.store.table_at.next_multiple_of(64)
    }
}

fn fenced<T: ?Sized>(op: Op<'_, T>, is_fenced: bool) -> Op<'_, T> {
    if is_fenced { op.fenced() } else { op }
}

/// Operands of a step.
enum Operands {
    None,
    Bytes(Vec<u8>),
    /// What to compare and to swap.
    Swap(u64, u64),
    Addend(zerocopy::little_endian::U64),
}

impl Operands {
    fn of(step: &Step) -> Operands {
        match step.op {
            litmus::Op::Read { .. } => Operands::None,
            litmus::Op::Write { .. } => {
                Operands::Bytes(step.op.payload().iter().flat_map(|word| word.to_le_bytes()).collect())
            }
            litmus::Op::Cas { compare, swap, .. } => Operands::Swap(compare, swap),
            litmus::Op::Faa { add, .. } => Operands::Addend(add.into()),
        }
    }
}

fn words(bytes: &[u8]) -> Vec<u64> {
    let word = |word: &[u8]| u64::from_le_bytes(word.try_into().expect("a word has 8 bytes"));
    bytes.chunks_exact(WORD_SIZE).map(word).collect()
}

const STORE: &str = "litmus";

/// Whether the program has two actors, and no atomic with a mask, which the device lacks.
fn is_supported(program: &Program) -> bool {
    let has_mask =
        |step: &Step| matches!(step.op, litmus::Op::Cas { masks, .. } if masks != [u64::MAX, u64::MAX]);
    program.actors().len() == 2 && !program.steps().any(|(_, step)| has_mask(step))
}

/// Two threads, each with a session, that run one program after the other together.
struct Bench<'a> {
    both: &'a Barrier,
    task: &'a Mutex<Option<(Program, u64)>>,
    results: &'a Mutex<[Vec<Vec<u64>>; 2]>,
}

impl Bench<'_> {
    /// Runs the second actor of each program until there is none.
    fn second(&self, pool: &Pool) {
        let actor = Actor::open(pool);
        loop {
            self.both.wait();
            let Some((program, seed)) = self.task.lock().expect("no panic").clone() else { return };
            let late = seed % 7 * 20;
            self.both.wait();
            spin(Duration::from_micros(late));
            let results = actor.run(&program.actors()[1]);
            self.results.lock().expect("no panic")[1] = results;
            self.both.wait();
        }
    }

    fn run(&self, actor: &Actor, program: &Program, seed: u64) -> Outcome {
        let memory = program.memory();
        actor.set(&memory);
        *self.task.lock().expect("no panic") = Some((program.clone(), seed));
        self.both.wait();
        self.both.wait();
        spin(Duration::from_micros(seed / 7 % 7 * 20));
        let first = actor.run(&program.actors()[0]);
        self.both.wait();
        let second = std::mem::take(&mut self.results.lock().expect("no panic")[1]);
        Outcome { answers: first.into_iter().chain(second).collect(), memory: actor.memory(memory.len()) }
    }
}

/// Waits without sleeping, since a sleep is longer than a request.
fn spin(time: Duration) {
    let since = Instant::now();
    while since.elapsed() < time {
        std::hint::spin_loop();
    }
}

#[test]
#[ignore = "takes an RDMA device: cargo xtask verbs"]
fn no_forbidden_outcome_occurs_on_the_device() {
    let node = node(Atomic::Nic, &["--memory", "64MiB"]);
    let pool = farside::connect(&node.listening()).expect("the node serves");
    let new = NewStore { kind: "pilaf".into(), ..NewStore::prism_kv(STORE, 16 << 20) };
    pool.create_store(&new).expect("the node has memory");
    let programs: Vec<Program> = litmus::programs().into_iter().filter(is_supported).collect();
    let (both, task, results) = (Barrier::new(2), Mutex::new(None), Mutex::default());
    let bench = Bench { both: &both, task: &task, results: &results };
    let since = Instant::now();
    // By the name of a shape: programs, allowed outcomes, and those that occurred.
    let mut seen: BTreeMap<String, [usize; 3]> = BTreeMap::new();
    let mut forbidden = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| bench.second(&pool));
        let actor = Actor::open(&pool);
        // The named shapes come first; of the drawn ones, as many as there is time for.
        for program in &programs {
            if since.elapsed() > TIME_MAX {
                break;
            }
            match compare(program, false, RUNS, |program, seed| bench.run(&actor, program, seed)) {
                Ok(coverage) => {
                    let [programs, allowed, reached] = seen.entry(program.name().into()).or_default();
                    *programs += 1;
                    *allowed += coverage.allowed;
                    *reached += coverage.allowed - coverage.unreached.len();
                }
                Err(found) => forbidden.push(found.to_string()),
            }
        }
        *task.lock().expect("no panic") = None;
        both.wait();
    });
    for (name, [programs, allowed, reached]) in &seen {
        println!("{name}: {programs} programs, {reached} of {allowed} allowed outcomes occurred");
    }
    let ran: usize = seen.values().map(|[programs, ..]| programs).sum();
    println!("{ran} of {} programs of two actors ran in {:.0?}", programs.len(), since.elapsed());
    assert!(forbidden.is_empty(), "{} forbidden outcomes: {}", forbidden.len(), forbidden.join("\n"));
    assert!(
        ran >= 20 && seen.values().any(|[_, _, reached]| *reached > 1),
        "too little ran to judge: {seen:?}"
    );
}
