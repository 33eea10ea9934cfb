//! Litmus programs of two actors on the device: no outcome occurs that the contract of one-sided memory forbids.
//!
//! The programs are those on which the simulated NIC is held to the same contract ([`farside_sim::litmus`]). An actor
//! is a thread with a queue pair of its own; the device runs READ, WRITE and atomics. The memory is the table of a
//! store, which nobody else uses.
//!
//! A device that does not read and write whole lines, such as one in software, promises no more than whole words. On it
//! the programs run with one word in place of each line. Such a device may also lose the report that a list has ended:
//! then the client gives the list up, nobody knows what has run, and the program runs once more, with new sessions.

use super::{Atomic, device, node};
use farside::{NewStore, Pool};
use farside_fabrics::executor::block_on;
use farside_fabrics::verbs::device::devices;
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::fabric::ServiceId;
use farside_remote::{
    Addr, Capabilities, Chain, ChainBuf, Fabric, FabricError, Key, Mode, NodeId, Op, Reply, Status, cas,
    fetch_add, read, write,
};
use farside_sim::litmus::{self, LINE_WORDS, Outcome, Program, Seeds, Start, Step, WORD_SIZE, compare};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Barrier;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Time for all programs. The virtual machine runs few of them in it, a NIC all.
const TIME_MAX: Duration = Duration::from_secs(60);

/// Runs of a program.
const RUNS: Seeds = Seeds { at_least: 25, at_most: 50 };

/// Number of reports that a device in software may lose.
const LOST_MAX: u32 = 3;

/// Number of programs that must run, so that the device is judged.
const PROGRAMS_MIN: usize = 20;

const NODE: NodeId = NodeId(0);

/// An actor's session, with the key that the session got for the store.
struct Actor {
    endpoint: farside::parts::Endpoint,
    store: Store,
    may_lose: bool,
}

/// The device has lost a report.
struct Lost;

impl Actor {
    /// Opens a session. `may_lose` says whether the device may lose reports.
    fn open(pool: &Pool, may_lose: bool) -> Actor {
        let endpoint = pool.endpoint_here().expect("a session");
        let request = serde_json::to_vec(&Ask::OpenStore { name: STORE.into() }).expect("plain data");
        let mut answer = Vec::new();
        block_on(&endpoint, endpoint.call(NODE, ServiceId::NODE, &request, &mut answer)).expect("answered");
        match serde_json::from_slice(&answer).expect("an answer") {
            Answer::Store(store) => Actor { endpoint, store, may_lose },
            other => panic!("requested a store, got {other:?}"),
        }
    }

    fn run_chain(&self, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), Lost> {
        match block_on(&self.endpoint, self.endpoint.run(NODE, chain, reply)) {
            Ok(()) => Ok(()),
            Err(FabricError::Broken { reason, .. }) if self.may_lose && reason.contains("no request") => {
                println!("lost: {reason}");
                Err(Lost)
            }
            Err(error) => panic!("the device runs every verb: {error}"),
        }
    }

    /// Runs the steps of one actor, and returns their results.
    fn run(&self, steps: &[Step]) -> Result<Vec<Vec<u64>>, Lost> {
        // A step that waits begins another chain.
        let lists = steps.chunk_by(|_, next| next.start != Start::Waits).map(|list| self.run_list(list));
        Ok(lists.collect::<Result<Vec<_>, Lost>>()?.concat())
    }

    /// Runs steps as one chain: one list of the queue pair.
    fn run_list(&self, list: &[Step]) -> Result<Vec<Vec<u64>>, Lost> {
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
        self.run_chain(&chain, &mut reply)?;
        let results = reply.statuses().enumerate().map(|(index, status)| {
            assert!(matches!(status, Status::Ok | Status::CasFailed), "{status:?}");
            words(reply.output(index))
        });
        Ok(results.collect())
    }

    /// Writes the words of the program's memory.
    fn set(&self, memory: &[u64]) -> Result<(), Lost> {
        let bytes: Vec<u8> = memory.iter().flat_map(|word| word.to_le_bytes()).collect();
        let (mut buf, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buf.begin(self.key());
        let written = chain.also(write(Addr::new(self.first()), &bytes));
        self.run_chain(&chain, &mut reply)?;
        assert_eq!(reply.status(written), Status::Ok);
        Ok(())
    }

    /// Reads the first `count` words of the program's memory.
    fn memory(&self, count: usize) -> Result<Vec<u64>, Lost> {
        let (mut buf, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buf.begin(self.key());
        let got = chain.also(read(Addr::new(self.first()), (count * WORD_SIZE) as u32));
        self.run_chain(&chain, &mut reply)?;
        Ok(words(reply.get(got).expect("allowed")))
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

/// Returns the program as the device can run it. `None` if the program has not two actors, has an atomic
/// with a mask, which the device lacks, or accesses parts of lines although the device does not keep lines whole.
fn supported(program: &Program, has_lines: bool) -> Option<Program> {
    let has_mask =
        |step: &Step| matches!(step.op, litmus::Op::Cas { masks, .. } if masks != [u64::MAX, u64::MAX]);
    if program.actors().len() != 2 || program.steps().any(|(_, step)| has_mask(step)) {
        return None;
    }
    if has_lines { Some(program.clone()) } else { narrowed(program) }
}

/// Returns the program with one word in place of each line; `None` if a verb accesses anything but a word or a line.
fn narrowed(program: &Program) -> Option<Program> {
    let is_place = |step: &Step| match &step.op {
        litmus::Op::Write { pieces, .. } if pieces.len() > 1 => false,
        op => op.words() == 1 || op.words() == LINE_WORDS && op.at().is_multiple_of(LINE_WORDS),
    };
    if !program.steps().all(|(_, step)| is_place(step)) {
        return None;
    }
    // In a program's text, a line is a letter, and a word of it has an index in brackets.
    let of_word = |text: &str| match text.as_bytes() {
        [b'a'..=b'z'] | [b'a'..=b'z', b'=' | b';', ..] => format!("{}[0]{}", &text[..1], &text[1..]),
        _ => text.to_owned(),
    };
    let words: Vec<String> = program.to_string().split(' ').map(of_word).collect();
    Some(words.join(" ").parse().expect("a program"))
}

/// A command to the second actor.
enum Command {
    /// Run a program, after this pause.
    Run(Program, Duration),
    /// Open another session.
    Reopen,
}

/// The second actor's ends of the channels between both actors.
struct Second {
    commands: Receiver<Command>,
    /// The actor's results of each command.
    results: Sender<Result<Vec<Vec<u64>>, Lost>>,
}

impl Second {
    /// Runs the second actor of each program.
    fn run(self, open: impl Fn() -> Actor, both: &Barrier) {
        let mut actor = open();
        while let Ok(command) = self.commands.recv() {
            let results = match command {
                Command::Run(program, pause) => {
                    both.wait();
                    spin(pause);
                    actor.run(&program.actors()[1])
                }
                Command::Reopen => {
                    actor = open();
                    Ok(Vec::new())
                }
            };
            if self.results.send(results).is_err() {
                return;
            }
        }
    }
}

/// The first actor, with its ends of the channels.
struct First<'a> {
    actor: Actor,
    commands: Sender<Command>,
    results: Receiver<Result<Vec<Vec<u64>>, Lost>>,
    both: &'a Barrier,
    /// Time of one request. The actors begin at times that differ by parts of it.
    request: Duration,
}

impl First<'_> {
    /// Measures the time of a request.
    fn measure(&mut self) -> Result<(), Lost> {
        self.actor.memory(1)?;
        let since = Instant::now();
        for _ in 0..8 {
            self.actor.memory(1)?;
        }
        self.request = since.elapsed() / 8;
        Ok(())
    }

    /// Opens other sessions for both actors: while an actor waits for the other one, its session ends.
    fn reopen(&mut self, open: impl Fn() -> Actor) {
        self.commands.send(Command::Reopen).expect("the second actor waits");
        let _opened = self.results.recv().expect("the second actor has a session");
        self.actor = open();
    }

    /// Runs a program with the pauses of a seed.
    fn run(&self, program: &Program, seed: u64) -> Result<Outcome, Lost> {
        const PAUSES: u64 = 5;
        let pause = |number: u64| self.request * (number % PAUSES) as u32 / PAUSES as u32;
        let memory = program.memory();
        self.actor.set(&memory)?;
        let command = Command::Run(program.clone(), pause(seed / PAUSES));
        self.commands.send(command).expect("the second actor waits");
        self.both.wait();
        spin(pause(seed));
        let first = self.actor.run(&program.actors()[0]);
        let second = self.results.recv().expect("the second actor has run its verbs");
        let answers = first?.into_iter().chain(second?).collect();
        Ok(Outcome { answers, memory: self.actor.memory(memory.len())? })
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
    let name = device();
    let listed = devices().expect("the library finds the device");
    let listed = listed.iter().find(|listed| listed.name == name).expect("the device is listed");
    let has_lines = listed.capabilities().contains(Capabilities::WHOLE_LINES);
    let mut texts = BTreeSet::new();
    // The well-known shapes come first; of the others, as many as there is time for.
    let programs: Vec<(String, Program)> = litmus::programs()
        .iter()
        .filter_map(|program| Some((program.name().to_owned(), supported(program, has_lines)?)))
        .filter(|(_, program)| texts.insert(program.to_string()))
        .collect();

    let node = node(Atomic::Nic, &["--memory", "64MiB"]);
    let pool = farside::connect(&node.listening()).expect("the node serves");
    let new = NewStore { kind: "pilaf".into(), ..NewStore::prism_kv(STORE, 16 << 20) };
    pool.create_store(&new).expect("the node has memory");
    let open = || Actor::open(&pool, !has_lines);
    let (both, (commands, commands_at), (results_to, results)) = (Barrier::new(2), channel(), channel());
    let since = Instant::now();
    let (mut ran, mut reached_several, mut lost, mut forbidden) = (0, 0, 0, Vec::new());
    std::thread::scope(|scope| {
        let second = Second { commands: commands_at, results: results_to };
        scope.spawn(|| second.run(open, &both));
        let mut first = First { actor: open(), commands, results, both: &both, request: Duration::ZERO };
        let mut again = |first: &mut First<'_>| {
            lost += 1;
            assert!(lost <= LOST_MAX, "the device has lost {lost} reports");
            first.reopen(open);
        };
        while first.measure().is_err() {
            again(&mut first);
        }
        println!(
            "a request takes {:.0?}; lines are {}",
            first.request,
            if has_lines { "whole" } else { "words" }
        );
        for (name, program) in &programs {
            if since.elapsed() > TIME_MAX {
                break;
            }
            let mut seen: BTreeMap<Outcome, u32> = BTreeMap::new();
            let compared = compare(program, false, RUNS, |program, seed| {
                let outcome = loop {
                    match first.run(program, seed) {
                        Ok(outcome) => break outcome,
                        Err(Lost) => again(&mut first),
                    }
                };
                *seen.entry(outcome.clone()).or_default() += 1;
                outcome
            });
            match compared {
                Ok(coverage) => {
                    let reached = coverage.allowed - coverage.unreached.len();
                    println!("{name}: {program}: {reached} of {} allowed outcomes", coverage.allowed);
                    ran += 1;
                    reached_several += usize::from(reached > 1);
                }
                Err(found) => forbidden.push(found.to_string()),
            }
            for (outcome, times) in seen {
                println!("  {times} times {}", program.text_of(&outcome));
            }
        }
    });
    println!(
        "{ran} of {} programs of two actors ran in {:.0?}, {reached_several} of them with several outcomes; {lost} \
         reports were lost",
        programs.len(),
        since.elapsed()
    );
    assert!(forbidden.is_empty(), "{} forbidden outcomes: {}", forbidden.len(), forbidden.join("\n"));
    assert!(
        ran >= PROGRAMS_MIN && reached_several >= PROGRAMS_MIN / 4,
        "too little ran to judge: {ran} programs, {reached_several} of them with several outcomes"
    );
}
