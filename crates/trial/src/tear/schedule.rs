//! One run of a protocol: a few clients, one object and a NIC, without a node, a network or faults.
//!
//! Each verb takes [`FLIGHT`] in each direction, and the NIC executes it at once, except for the steps that the plan
//! makes late: the copy of a READ's line, the landing of a WRITE's line, the two halves of an atomic.
//!
//! Invariant: the same protocol and plan give the same run.

use super::truth::{Finding, Kind, Seen, Truth};
use super::{Attempt, Far, Posting, Protocol};
use crate::latches::{AT, AT_ONCE, FLIGHT};
use farside_sim::memory::{Bytes, Seen as Counted};
use farside_sim::nic::{Completion, Connection, Effect, Nic, Step, Timing, Verb};
use farside_sim::random::Random;
use farside_sim::world::{Nanos, SECONDS, World};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Size of the memory in bytes.
const MEMORY: u64 = 8 << 20;
/// Operations are stuck if each of those that run has started again this many times, and nothing else has happened.
const AGAIN_MAX: u32 = 16;

/// Which client does what and when, and which steps of the NIC are late.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Seed of the order in which the lines of a WRITE land, if they land in any order.
    pub seed: u64,
    /// Whether the lines of a WRITE land in any order.
    pub relaxed: bool,
    /// The clients.
    pub actors: Vec<Actor>,
}

/// A client with its operations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Actor {
    /// Whether the client writes. Otherwise it reads.
    pub is_writer: bool,
    /// The operations, one after the other.
    pub operations: Vec<Operation>,
    /// By how many nanoseconds each step of the client's verbs is late, in the order in which the verbs arrive. Later
    /// steps are not late.
    pub late: Vec<Nanos>,
}

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Index of the writers' operation in [`Protocol::kinds`]. 0 for a read.
    pub kind: usize,
    /// Time in nanoseconds from the end of the operation before, or from the beginning.
    pub pause: Nanos,
}

/// How late steps are drawn that a plan does not fix.
#[derive(Debug)]
pub struct Drawing {
    /// Source of the draws.
    pub random: Random,
    /// One in this many steps is late.
    pub one_in: u64,
    /// Maximum time in units of [`UNIT`].
    pub late_max: u64,
}

/// Unit of times in plans, in nanoseconds. Round times make schedules readable.
pub const UNIT: Nanos = 100;

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Virtual time.
    pub time: Nanos,
    /// Index of the client in the plan.
    pub actor: usize,
    /// What the client or its verb did.
    pub what: What,
}

/// What a client or its verb did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// An operation begins.
    Begins {
        /// Index of the writers' operation.
        kind: usize,
    },
    /// A writer creates a write.
    Creates {
        /// Number of the write.
        number: u8,
    },
    /// A step of a verb accesses memory.
    Accesses {
        /// The verb as people write it.
        verb: Rc<str>,
        /// The step. Its address is an offset in the object.
        step: Step,
        /// Bytes that were read or written.
        bytes: Vec<u8>,
    },
    /// The operation starts again.
    StartsAgain,
    /// All verbs of a writer's operation have completed.
    Completes,
    /// A reader accepts what it has read.
    Accepts,
}

/// Numbers of what happened in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Operations of writers that have completed.
    pub written: u64,
    /// Reads that were accepted.
    pub accepted: u64,
    /// Attempts of operations that started again.
    pub again: u64,
    /// READs whose lines were not a snapshot of one instant.
    pub torn_reads: u64,
    /// Events of the world.
    pub events: u64,
}

/// A run.
#[derive(Debug)]
pub struct Ran {
    /// What the run has shown, and the index of the client that showed it.
    pub finding: Option<(usize, Finding)>,
    /// The events, if they were recorded.
    pub events: Vec<Event>,
    /// Hash of the order of all accesses to memory.
    pub order: u64,
    /// Numbers of what happened.
    pub tally: Tally,
    /// For each client, by how much each step was late.
    pub late: Vec<Vec<Nanos>>,
    /// For each client and each operation that began, the number of the client's steps before it.
    pub begun: Vec<Vec<usize>>,
}

/// Memory in which runs take place one after the other.
pub struct Bench {
    bytes: Rc<Bytes>,
}

impl Default for Bench {
    fn default() -> Bench {
        Bench { bytes: Rc::new(Bytes::new(MEMORY)) }
    }
}

impl Bench {
    /// Runs a plan. Steps that the plan does not fix are drawn, or are not late. `records` tells whether to record the
    /// events.
    pub fn run<P: Protocol + 'static>(
        &self,
        protocol: &Rc<P>,
        plan: &Plan,
        drawing: Option<Drawing>,
        records: bool,
    ) -> Ran {
        let shape = protocol.shape();
        self.bytes.poke(AT, &shape.start);
        let world = World::new(plan.seed);
        let nic = Nic::new(&world, &self.bytes, Timing { relaxed: plan.relaxed, ..AT_ONCE });
        let counted: Rc<Cell<Counted>> = Rc::default();
        nic.count_in(&counted);
        let late: Rc<RefCell<Vec<Late>>> =
            Rc::new(RefCell::new(plan.actors.iter().map(|actor| Late::of(&actor.late)).collect()));
        let asked = Rc::clone(&late);
        nic.direct_each(move |connection, _| asked.borrow_mut()[connection as usize].next(drawing.as_ref()));
        let state = Rc::new(State {
            world: world.clone(),
            truth: RefCell::new(Truth::new(&shape.data)),
            finding: RefCell::default(),
            events: RefCell::default(),
            records,
            order: Cell::new(0),
            tally: Cell::default(),
            again: RefCell::new(vec![Some(0); plan.actors.len()]),
            in_flight: Cell::new(0),
            texts: RefCell::new(vec![Vec::new(); plan.actors.len()]),
        });
        let (told, bytes) = (Rc::clone(&state), Rc::clone(&self.bytes));
        nic.watch(move |effect| told.see(effect, &bytes));
        let begun: Rc<RefCell<Vec<Vec<usize>>>> = Rc::new(RefCell::new(vec![Vec::new(); plan.actors.len()]));
        for (index, actor) in plan.actors.iter().enumerate() {
            let client = Client {
                index,
                is_writer: actor.is_writer,
                protocol: Rc::clone(protocol),
                state: Rc::clone(&state),
                connection: nic.connect(),
                late: Rc::clone(&late),
                begun: Rc::clone(&begun),
            };
            let operations = actor.operations.clone();
            world.spawn(world.start_process(), client.run(operations));
        }
        let has_ended = || state.finding.borrow().is_some() || state.has_ended();
        world.run_while(SECONDS, || !has_ended());
        world.end();
        let tally =
            Tally { torn_reads: counted.get().torn_reads, events: world.events(), ..state.tally.get() };
        let late = late.borrow().iter().map(|late| late.times.clone()).collect();
        Ran {
            finding: state.finding.take(),
            events: state.events.take(),
            order: state.order.get(),
            tally,
            late,
            begun: begun.take(),
        }
    }
}

/// By how much the steps of a client's verbs are late.
struct Late {
    times: Vec<Nanos>,
    next: usize,
}

impl Late {
    fn of(times: &[Nanos]) -> Late {
        Late { times: times.to_vec(), next: 0 }
    }

    fn next(&mut self, drawing: Option<&Drawing>) -> Nanos {
        if self.next == self.times.len() {
            let drawn = drawing.filter(|drawing| drawing.random.one_in(drawing.one_in));
            self.times.push(drawn.map_or(0, |drawing| drawing.random.between(1, drawing.late_max) * UNIT));
        }
        self.next += 1;
        self.times[self.next - 1]
    }
}

/// What all clients of a run share.
struct State {
    world: World,
    truth: RefCell<Truth>,
    finding: RefCell<Option<(usize, Finding)>>,
    events: RefCell<Vec<Event>>,
    records: bool,
    order: Cell<u64>,
    tally: Cell<Tally>,
    /// For each client, how often it has started again since an operation last ended; `None` if it has ended.
    again: RefCell<Vec<Option<u32>>>,
    /// Number of operations that have returned, and of which verbs are in flight.
    in_flight: Cell<u32>,
    /// For each client, the texts of the verbs that it has posted.
    texts: RefCell<Vec<Vec<Rc<str>>>>,
}

impl State {
    fn has_ended(&self) -> bool {
        self.in_flight.get() == 0 && self.again.borrow().iter().all(Option::is_none)
    }

    fn note(&self, actor: usize, what: What) {
        if self.records {
            self.events.borrow_mut().push(Event { time: self.world.now(), actor, what });
        }
    }

    fn count(&self, add: impl FnOnce(&mut Tally)) {
        let mut tally = self.tally.get();
        add(&mut tally);
        self.tally.set(tally);
    }

    fn find(&self, actor: usize, finding: Finding) {
        self.finding.borrow_mut().get_or_insert((actor, finding));
    }

    /// A step of a verb has accessed memory.
    fn see(&self, effect: Effect, bytes: &Bytes) {
        let Effect { connection, verb, step, len } = effect;
        let (kind, at) = match step {
            Step::Fetch(at) => (0, at - AT),
            Step::Land(at) => (1, at - AT),
            Step::Lock(at) => (2, at - AT),
            Step::WriteBack(at) => (3, at - AT),
        };
        for word in [connection, verb << 2 | kind, at, len as u64] {
            self.order.set((self.order.get().rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95));
        }
        if self.records {
            let mut accessed = vec![0; len];
            bytes.peek(at + AT, &mut accessed);
            let verb = Rc::clone(&self.texts.borrow()[connection as usize][verb as usize]);
            let step = [Step::Fetch, Step::Land, Step::Lock, Step::WriteBack][kind as usize](at);
            self.note(connection as usize, What::Accesses { verb, step, bytes: accessed });
        }
    }

    /// An operation of a client has started again.
    fn again(&self, actor: usize) {
        self.note(actor, What::StartsAgain);
        self.count(|tally| tally.again += 1);
        let mut again = self.again.borrow_mut();
        if let Some(count) = &mut again[actor] {
            *count += 1;
        }
        if self.in_flight.get() == 0 && again.iter().flatten().all(|&count| count >= AGAIN_MAX) {
            let text = format!(
                "each operation that has not ended has started again {AGAIN_MAX} times, and no other client is left \
                 that could end that"
            );
            self.find(actor, Finding { kind: Kind::Stuck, text });
        }
    }

    /// An operation has ended, or a client.
    fn progress(&self) {
        self.again.borrow_mut().iter_mut().flatten().for_each(|count| *count = 0);
    }

    fn completed(&self, actor: usize, number: Option<u8>) {
        self.note(actor, What::Completes);
        self.count(|tally| tally.written += 1);
        self.progress();
        if let Some(number) = number
            && let Err(finding) = self.truth.borrow_mut().complete(number, self.world.now())
        {
            self.find(actor, finding);
        }
    }
}

struct Client<P> {
    index: usize,
    is_writer: bool,
    protocol: Rc<P>,
    state: Rc<State>,
    connection: Connection,
    late: Rc<RefCell<Vec<Late>>>,
    begun: Rc<RefCell<Vec<Vec<usize>>>>,
}

impl<P: Protocol> Client<P> {
    async fn run(self, operations: Vec<Operation>) {
        for operation in operations {
            self.state.world.sleep(operation.pause).await;
            let steps = self.late.borrow()[self.index].next;
            self.begun.borrow_mut()[self.index].push(steps);
            self.operate(operation.kind).await;
        }
        self.state.again.borrow_mut()[self.index] = None;
        self.state.progress();
    }

    async fn operate(&self, kind: usize) {
        let Client { index, state, protocol, .. } = self;
        state.note(*index, What::Begins { kind });
        let began = state.world.now();
        let far = OnNic {
            actor: *index,
            state,
            connection: &self.connection,
            seen: RefCell::new(Seen::nothing(protocol.shape().start.len())),
            number: Cell::new(None),
            posted: RefCell::default(),
        };
        loop {
            far.seen.borrow_mut().clear();
            far.number.set(None);
            let attempt = match self.is_writer {
                true => protocol.write(&far, kind).await,
                false => protocol.read(&far).await,
            };
            if attempt == Attempt::Done {
                break;
            }
            state.again(*index);
            // The client's own time, without which an attempt that posts nothing would take none.
            state.world.sleep(FLIGHT).await;
        }
        if !self.is_writer {
            state.note(*index, What::Accepts);
            state.count(|tally| tally.accepted += 1);
            state.progress();
            let judged = state.truth.borrow().accept(&far.seen.borrow(), began);
            return judged.map_or_else(|finding| state.find(*index, finding), |_| ());
        }
        let number = far.number.get();
        let mut posted = far.posted.take();
        posted.retain(|completion| !completion.is_done());
        if posted.is_empty() {
            return state.completed(*index, number);
        }
        state.in_flight.set(state.in_flight.get() + 1);
        let (index, theirs) = (*index, Rc::clone(state));
        state.world.spawn(state.world.start_process(), async move {
            for completion in posted {
                completion.complete().await;
            }
            theirs.in_flight.set(theirs.in_flight.get() - 1);
            theirs.completed(index, number);
        });
    }
}

/// A client's access to the object through the NIC.
struct OnNic<'a> {
    actor: usize,
    state: &'a State,
    connection: &'a Connection,
    seen: RefCell<Seen>,
    number: Cell<Option<u8>>,
    /// Completions of all verbs of the operation.
    posted: RefCell<Vec<Completion>>,
}

impl Far for OnNic<'_> {
    fn post(&self, verbs: Vec<Posting>) -> impl Future<Output = Vec<Vec<u8>>> {
        self.state.texts.borrow_mut()[self.actor]
            .extend(verbs.iter().map(|posting| Rc::clone(&posting.text)));
        let mut reads = Vec::with_capacity(verbs.len());
        let verbs = verbs.into_iter().map(|Posting { mut verb, is_fenced, .. }| {
            let (Verb::Read { at, .. }
            | Verb::Write { at, .. }
            | Verb::Cas { at, .. }
            | Verb::FetchAdd { at, .. }) = &mut verb;
            let offset = *at as usize;
            *at += AT;
            reads.push(matches!(verb, Verb::Read { .. }).then_some(offset));
            (verb, is_fenced)
        });
        let completions = self.connection.post_list(None, verbs.collect::<Vec<_>>());
        self.posted.borrow_mut().extend(completions.iter().cloned());
        async move {
            let mut results = Vec::with_capacity(completions.len());
            for completion in completions {
                results.push(completion.done().await);
            }
            let mut seen = self.seen.borrow_mut();
            for (read, result) in reads.iter().zip(&results) {
                if let Some(at) = read {
                    seen.add(*at, result);
                }
            }
            results
        }
    }

    fn update(&self, image: &mut [u8]) {
        let now = self.state.world.now();
        let number = self.state.truth.borrow_mut().create(image, &self.seen.borrow(), now);
        self.number.set(number);
        if let Some(number) = number {
            self.state.note(self.actor, What::Creates { number });
        }
    }
}
