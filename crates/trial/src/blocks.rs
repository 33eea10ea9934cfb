//! The family of block stores. Each block of a store is a register, which is zeros at first.
//!
//! The store lies on all nodes, except for spare ones. Recoverers replace lost members, and at times living ones by
//! spare nodes. Each client has a session with each node, and its tasks share one client of the system.
//!
//! Invariant: an operation without a known outcome never ends in the history. Another client may complete it at any
//! later time: one that reads the block writes it back.
//! Invariant: a block's bytes name the write and the block, so a torn or foreign block is detected.

use crate::family::{Failure, FailureKind, Family, Seat};
use crate::flight::{Phase, Phases, Request, Tracked};
use crate::pool::SILENCE;
use crate::systems::System;
use crate::{Choice, Drawn, Scene, leaves, values};
use farside_remote::arena::SEGMENT_SIZE;
use farside_remote::control;
use farside_remote::fabric::Ran;
use farside_remote::wire::Code;
use farside_remote::{ChainView, NodeId};
use farside_sim::fault::Fault;
use farside_sim::history::register::{Ask, Outcome, Value};
use farside_sim::linearizable::{Limits, Registers};
use farside_sim::random::Random;
use farside_sim::world::{MICROS, MILLIS, Nanos, Turnstile};
use farside_systems::blocks::prism_rs::replace::ReplaceOptions;
use farside_systems::blocks::{Blocks as _, BlocksError, abd_lock, prism_rs};
use farside_systems::heal::{Action, Healed};
use farside_systems::members;
use farside_systems::registry::AnyBlocks;
use farside_systems::store::StoreError;
use farside_systems::system::{Options, Sizing};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// A system of blocks, with the options that a seed has drawn for it.
pub(crate) struct Blocks {
    /// Number of blocks, and the length of each in bytes.
    blocks: u64,
    len: u32,
    /// Number of writer ids.
    writers: u32,
    /// One in this many operations is on the first block, besides those that draw it by chance.
    first_one_in: u64,
    /// One in this many operations is a write.
    write_one_in: u64,
    /// One in this many operations is the last one of its client.
    leave_one_in: u64,
    /// Number of nodes without a member at first, which recoverers put in the places of members.
    spares: u32,
    /// Usual pauses of clients and of recoverers, in nanoseconds.
    rest: Nanos,
    recovers_after: Nanos,
    /// Options of a system with locks; `None` in other systems.
    locks: Option<Locks>,
}

/// Options of a system in which an operation holds locks, and a task of the client carries it out.
struct Locks {
    /// Length of a lease in microseconds, if the store has leases.
    lease_us: Option<u64>,
    /// Whether a lock is released by a request of its own.
    releases_apart: bool,
}

/// Limits of the check of a block. Many operations have no known outcome.
const LIMITS: Limits = Limits { operations_max: 5_000, steps_max: 8_000_000 };
/// A write has a tag with its number, its client and its block, in this order. These are the numbers of clients and of
/// blocks that it has room for.
const CLIENTS_MAX: u64 = 100;
const BLOCKS_MAX: u64 = 10_000;

/// One in this many times a recoverer heals the store although nothing is to do.
const HEALS_NOTHING_ONE_IN: u64 = 8;

/// Client of one task.
pub(crate) struct Client {
    store: AnyBlocks<Tracked>,
    /// Number of the client.
    who: u32,
    shared: Shared,
}

/// What the tasks of one client share.
#[derive(Clone, Default)]
pub(crate) struct Shared(Rc<All>);

#[derive(Default)]
struct All {
    /// Lets one task at a time open the store.
    gate: Turnstile,
    /// The client of the task that has opened the store.
    first: RefCell<Option<AnyBlocks<Tracked>>>,
    /// Whether the client is to close its sessions.
    leaves: Cell<bool>,
    /// Whether the client's own task runs.
    is_kept: Cell<bool>,
}

/// Indices of the phases of PRISM-RS. The idle phase is the first.
const FIND_ID: usize = 1;
const CLAIM: usize = 2;
const READ: usize = 3;
const TAGS: usize = 4;
const WRITE: usize = 5;
const WRITE_BACK: usize = 6;
const CATALOG: usize = 7;
// Phases of a recoverer. It looks before and after each step. Before it fills a newcomer, that one joins.
const LOOK: usize = 8;
const JOIN: usize = 9;
const FILL: usize = 10;
const PROMISE: usize = 11;
const ACCEPT: usize = 12;
const REVOKE: usize = 13;
/// Reads tags and nonces of revoked members.
const COMPARE: usize = 14;
/// Copies blocks and claims among revoked members.
const COPY: usize = 15;
const ENABLE: usize = 16;
const LEAVE: usize = 17;

/// The phases are in the order of the constants.
static PHASES: Phases = Phases {
    all: &[
        Phase::of_lasting("idle").rare(),
        Phase::of_lasting("find id").rare(),
        Phase::of_lasting("claim").rare(),
        Phase::of_lasting("read"),
        Phase::of_lasting("tags"),
        Phase::of_lasting("write"),
        Phase::of_lasting("write back").rare(),
        Phase::of_lasting("catalog").rare(),
        Phase::of_recoverers("look"),
        Phase::of_recoverers("join").rare().first(),
        Phase::of_recoverers("fill"),
        Phase::of_recoverers("promise").rare(),
        Phase::of_recoverers("accept").rare(),
        Phase::of_recoverers("revoke").rare(),
        Phase::of_recoverers("compare").rare(),
        Phase::of_recoverers("copy").rare(),
        Phase::of_recoverers("enable").rare(),
        Phase::of_recoverers("leave").rare().first(),
    ],
    of: |request, seen| match request {
        Request::Call(..) => CATALOG,
        Request::Chain(chain) => phase_of(chain, seen),
    },
};

/// Returns the phase of a chain of PRISM-RS, by its ops. The highest id is the first word of the table, which begins
/// with a segment.
fn phase_of(chain: ChainView<'_>, seen: u32) -> usize {
    let mut ops = chain.ops();
    let (first, others) = (ops.next().expect("a chain has an op"), ops.count());
    match (chain.allocates(), chain.atomics()) {
        (0, 0) if others > 0 => READ,
        (0, 0) if first.target().raw().is_multiple_of(SEGMENT_SIZE) => FIND_ID,
        (0, 0) => TAGS,
        (0, _) => CLAIM,
        _ if seen >> READ & 1 == 1 => WRITE_BACK,
        _ => WRITE,
    }
}

/// Returns the phase of a recoverer's request. What comes before a promise fills the newcomer.
fn phase_of_recovery(request: Request<'_>, seen: u32) -> usize {
    let is_decided = seen >> PROMISE & 1 == 1;
    let chain = match request {
        Request::Chain(chain) => chain,
        Request::Call(_, request) => {
            return match serde_json::from_slice(request).expect("a request to a node") {
                control::Ask::PrepareStore { .. } => JOIN,
                control::Ask::Promise { .. } => PROMISE,
                control::Ask::Accept { .. } => ACCEPT,
                control::Ask::Revoke { .. } if is_decided => REVOKE,
                control::Ask::Revoke { .. } => FILL,
                control::Ask::Enable { .. } => ENABLE,
                control::Ask::Leave { .. } | control::Ask::Decide { .. } => LEAVE,
                _ => LOOK,
            };
        }
    };
    match (chain.allocates() + chain.atomics(), chain.ops().count()) {
        _ if !is_decided => FILL,
        (0, 1) => COMPARE,
        _ => COPY,
    }
}

/// Indices of the phases of ABDLOCK.
const ABD_CLAIM: usize = 1;
const ABD_LOCK: usize = 2;
const ABD_READ: usize = 3;
const ABD_WRITE: usize = 4;
const ABD_FREE: usize = 5;
const ABD_RENEW: usize = 6;
const ABD_WATCH: usize = 7;
const ABD_FENCE: usize = 8;
const ABD_CATALOG: usize = 9;

/// The phases are in the order of the constants.
static PHASES_OF_ABD: Phases = Phases {
    all: &[
        Phase::of_lasting("idle").rare(),
        Phase::of_lasting("claim"),
        Phase::of_lasting("lock"),
        Phase::of_lasting("read"),
        Phase::of_lasting("write"),
        Phase::of_lasting("free"),
        Phase::of_lasting("renew"),
        Phase::of_lasting("watch").rare(),
        Phase::of_lasting("fence").rare().led_to_by(ABD_READ),
        Phase::of_lasting("catalog"),
    ],
    of: |request, _| match request {
        Request::Call(_, request) => match serde_json::from_slice(request) {
            Ok(control::Ask::Fence { .. }) => ABD_FENCE,
            _ => ABD_CATALOG,
        },
        Request::Chain(chain) => phase_of_abd(chain),
    },
};

/// Returns the phase of a chain of ABDLOCK, by its ops. The nonce that a client writes into its entry before its first
/// lock counts as a lock.
fn phase_of_abd(chain: ChainView<'_>) -> usize {
    let mut ops = chain.ops();
    let (first, others) = (ops.next().expect("a chain has an op"), ops.count());
    match first.code() {
        Code::FetchAdd => ABD_RENEW,
        Code::Write => ABD_WRITE,
        Code::Cas if others > 0 => ABD_CLAIM,
        Code::Cas if first.operands()[..8] == [0; 8] => ABD_LOCK,
        Code::Cas => ABD_FREE,
        _ if first.target().raw().is_multiple_of(SEGMENT_SIZE) => ABD_CLAIM,
        _ if first.header().len.get() == 16 => ABD_WATCH,
        _ => ABD_READ,
    }
}

impl Family for Blocks {
    type Ask = Ask;
    type Client = Client;
    type Shared = Shared;
    type Checker = Registers;

    const SPANS: bool = true;

    fn drawn_nodes(_system: System, random: &Random) -> u32 {
        if random.one_in(3) { 5 } else { 3 }
    }

    fn drawn(system: System, drawn: &Drawn, random: &Random) -> Blocks {
        let draws_locks = || Locks {
            lease_us: (!random.one_in(4)).then(|| random.between(5_000, 20_000)),
            releases_apart: random.one_in(3),
        };
        let (blocks, is_locked) = (drawn.keys, system.name() == abd_lock::KIND);
        let phases = Self::phases(system).all;
        let is_about_recoverers = drawn.focus.is_some_and(|phase| phases[phase].is_of_recoverers);
        Blocks {
            blocks,
            len: [512, 512, 1024, 1536, 4096, 4096, 8192][random.below(7) as usize],
            // A claim that fails uses up an id, and so does each process of a client.
            writers: {
                let drawn = [12, 64, 500, 500][random.below(4) as usize];
                // Readers need an id, too, if they take locks.
                if is_locked { 5_000 } else { drawn }
            },
            first_one_in: [1, 2, 0][random.below(3) as usize],
            write_one_in: random.between(2, 3),
            leave_one_in: [0, 10, 40][random.below(3) as usize],
            locks: is_locked.then(draws_locks),
            spares: match is_about_recoverers && !random.one_in(4) {
                _ if is_locked => 0,
                true => 1,
                false => random.below(2) as u32,
            },
            rest: match is_about_recoverers {
                true => MILLIS,
                false => [5 * MICROS, 100 * MICROS, MILLIS][random.below(3) as usize],
            },
            recovers_after: match is_about_recoverers {
                true => 50 * MICROS,
                false => [50 * MICROS, 500 * MICROS, 5 * MILLIS][random.below(3) as usize],
            },
        }
    }

    /// Only replicas without locks are replaced.
    fn recoverers(&self) -> u32 {
        if self.locks.is_some() { 0 } else { 2 }
    }

    fn spares(&self) -> u32 {
        self.spares
    }

    fn rest(&self) -> Nanos {
        self.rest
    }

    fn recovers_after(&self) -> Nanos {
        self.recovers_after
    }

    fn phase_of_recovery(request: Request<'_>, seen: u32) -> usize {
        phase_of_recovery(request, seen)
    }

    /// Replaces a living member by a spare node, or heals the store as `farside heal` does.
    async fn recover(&self, scene: &Scene, fabric: &Tracked) -> Result<(), String> {
        let (random, configurations) = (scene.world.random(), &scene.configurations);
        let spare = configurations.spare().filter(|_| random.one_in(2));
        if spare.is_none() && !configurations.is_unsettled() && !random.one_in(HEALS_NOTHING_ONE_IN) {
            return Ok(());
        }
        let failed = match spare {
            Some(by) => {
                replace(scene, fabric, random.below(scene.drawn.nodes.into()) as usize, by).await.err()
            }
            None => heal(scene, fabric).await.err(),
        };
        match failed.map(|error| error.to_string()).filter(|error| error.contains("the same release")) {
            Some(error) => Err(format!("a recoverer did not understand a node: {error}")),
            None => Ok(()),
        }
    }

    async fn recover_all(&self, scene: &Scene, fabric: &Tracked) -> Result<(), String> {
        heal(scene, fabric).await.map_err(|error| error.to_string())?;
        scene.configurations.look(scene);
        match scene.configurations.is_unsettled() {
            true => Err(format!("the nodes hold: {}", scene.configurations.describe())),
            false => Ok(()),
        }
    }

    fn is_owned(&self) -> bool {
        self.locks.is_some()
    }

    fn waits_for_others(&self) -> bool {
        self.locks.is_some()
    }

    /// Without leases, the locks of a dead client are held for ever.
    fn survives(&self, fault: Fault) -> bool {
        fault != Fault::ClientDeath || self.locks.as_ref().is_none_or(|locks| locks.lease_us.is_some())
    }

    fn options(&self) -> Vec<Choice> {
        let Blocks { len, writers, first_one_in, write_one_in, leave_one_in, spares, .. } = *self;
        let mut choices = vec![
            Choice::new("block_bytes", len, format!("block size {len}")),
            Choice::new("writers", writers, format!("writer ids {writers}")),
            Choice::new("first_one_in", first_one_in, format!("on the first block 1 in {first_one_in}")),
            Choice::new("write_one_in", write_one_in, format!("writes 1 in {write_one_in}")),
            Choice::new("leave_one_in", leave_one_in, leaves(leave_one_in)),
            Choice::new("spares", spares, format!("spare nodes {spares}")),
        ];
        if let Some(Locks { lease_us, releases_apart }) = self.locks {
            let lease = lease_us.map_or("no leases".to_owned(), |lease_us| format!("lease {lease_us} us"));
            choices.push(Choice::new("lease_us", lease_us, lease));
            let apart = if releases_apart { "apart" } else { "with the write" };
            choices.push(Choice::new(
                "releases_apart",
                releases_apart,
                format!("locks are released {apart}"),
            ));
        }
        choices
    }

    fn parameters(&self) -> String {
        String::new()
    }

    fn long_pause_one_in(&self, random: &Random) -> u64 {
        let drawn = [0, 0, 3][random.below(3) as usize];
        // Then the other pauses are often longer than a lease.
        if self.locks.as_ref().is_some_and(|locks| locks.lease_us.is_some()) { 3 } else { drawn }
    }

    fn sizing(&self) -> Sizing {
        Sizing {
            items: Some(self.blocks),
            value_len: self.len as usize,
            writers: Some(self.writers),
            lease: self.locks.as_ref().and_then(|locks| locks.lease_us).map(Duration::from_micros),
            ..Sizing::default()
        }
    }

    /// Although clients use chains only, an operation does not end with its session: others may write it back.
    fn is_one_sided(&self) -> bool {
        false
    }

    fn phases(system: System) -> &'static Phases {
        match system.name() {
            prism_rs::KIND => &PHASES,
            _ => &PHASES_OF_ABD,
        }
    }

    fn checker(&self) -> Registers {
        Registers(LIMITS)
    }

    async fn open(&self, seat: Seat<'_, Blocks>, _node: NodeId, name: &str) -> Result<Client, Failure> {
        let (scene, who, shared) = (seat.scene, seat.client, seat.shared.clone());
        let _passage = shared.0.gate.enter().await;
        let first = shared.0.first.borrow().as_ref().map(AnyBlocks::another);
        if let Some(store) = first {
            return Ok(Client { store, who, shared: shared.clone() });
        }
        let options = Options {
            entropy: scene.world.random().bits(),
            releases_apart: self.locks.as_ref().is_some_and(|locks| locks.releases_apart),
            silence: Some(Duration::from_nanos(SILENCE)),
            ..Options::default()
        };
        let nodes = scene.sites.len() as u32;
        let store = AnyBlocks::open_in(seat.fabric(), nodes, name, &options).await?;
        *shared.0.first.borrow_mut() = Some(store.another());
        if self.locks.is_some() {
            let (theirs, keeper) = (shared.clone(), store.keeper());
            theirs.0.is_kept.set(true);
            scene.world.spawn(seat.process, async move {
                keeper.await;
                theirs.0.is_kept.set(false);
            });
        }
        Ok(Client { store, who, shared: shared.clone() })
    }

    /// Closes the client. A client with locks ends once it has freed them, so it waits for the end of all outages.
    async fn leave(&self, scene: &Scene, shared: &Shared) {
        while self.locks.is_some() && scene.outages.are_going_on(scene) {
            scene.world.sleep(MILLIS).await;
        }
        shared.0.first.take();
        while shared.0.is_kept.get() {
            scene.world.sleep(20 * MICROS).await;
        }
    }

    fn draw(&self, scene: &Scene, client: &mut Client) -> (u64, Ask) {
        let random = scene.world.random();
        let block = if random.one_in(self.first_one_in) { 0 } else { random.below(self.blocks) };
        let is_write = random.one_in(self.write_one_in);
        let value = || {
            let tag = (scene.next_tag() * CLIENTS_MAX + u64::from(client.who)) * BLOCKS_MAX + block;
            Value { tag, len: self.len }
        };
        (block, if is_write { Ask::Put(value()) } else { Ask::Get })
    }

    async fn perform(
        &self,
        _scene: &Scene,
        client: &mut Client,
        _who: u32,
        block: u64,
        ask: &Ask,
    ) -> Result<Outcome, Failure> {
        match *ask {
            Ask::Put(value) => {
                let written = client.store.write(block, &values::bytes(value)).await;
                written.map_err(|error| self.failed(error))?;
                Ok(Outcome::Done(None))
            }
            _ => {
                let mut bytes = vec![0xee; self.len as usize];
                client.store.read(block, &mut bytes).await.map_err(|error| self.failed(error))?;
                self.found(block, &bytes)
            }
        }
    }

    /// At times makes the client close its sessions.
    async fn trespass(&self, scene: &Scene, client: &mut Client) -> Result<(), Failure> {
        let leaves = &client.shared.0.leaves;
        leaves.set(leaves.get() || scene.world.random().one_in(self.leave_one_in));
        match leaves.get() {
            true => Err(failure(Ran::No, FailureKind::Over, "the client leaves".to_owned())),
            false => Ok(()),
        }
    }

    fn read_all(&self, _scene: &Scene) -> Vec<(u64, Ask)> {
        (0..self.blocks).map(|block| (block, Ask::Get)).collect()
    }
}

/// Puts node `by` in the place of a member.
async fn replace(scene: &Scene, fabric: &Tracked, index: usize, by: u32) -> Result<(), StoreError> {
    let (nodes, entropy) = (scene.sites.len() as u32, scene.world.random().bits());
    let members = members::open(fabric, nodes, &scene.sites[0].store_name()).await?;
    let options = ReplaceOptions { entropy, bytes_per_second: None, progress: &mut |_, _| () };
    prism_rs::replace::replace(fabric, &members, index, NodeId(by), options).await.map(drop)
}

/// Heals the store.
///
/// # Errors
/// The store, or a member of it, was left as it is.
async fn heal(scene: &Scene, fabric: &Tracked) -> Result<(), StoreError> {
    let (nodes, entropy) = (scene.sites.len() as u32, scene.world.random().bits());
    let (name, mut left) = (scene.sites[0].store_name(), None);
    let tell = |told: Healed| {
        if let Action::Left(error) = told.action {
            left = Some(error);
        }
    };
    let seen = farside_systems::heal::heal(fabric, nodes, Some(&name), Duration::ZERO, entropy, tell).await?;
    let silent = seen.silent.into_iter().map(|(_, error)| error).next();
    left.or(silent).map_or(Ok(()), Err)
}

impl Blocks {
    /// Returns the failure of an operation. If a WRITE under a lock has no answer, it cannot be repeated at once.
    fn failed(&self, error: BlocksError) -> Failure {
        let is_interrupted = match &error {
            BlocksError::NoMajority { answered, ran, .. } => *answered > 0 || *ran != Ran::No,
            _ => false,
        };
        let failure = Failure::from(error);
        match self.locks.is_some() && is_interrupted && failure.kind == FailureKind::Declined {
            true => Failure { kind: FailureKind::Interrupted, ..failure },
            false => failure,
        }
    }

    /// Returns the outcome of a read that has returned these bytes.
    fn found(&self, block: u64, bytes: &[u8]) -> Result<Outcome, Failure> {
        if bytes.iter().all(|&byte| byte == 0) {
            return Ok(Outcome::Absent);
        }
        match values::known(bytes).filter(|value| value.tag % BLOCKS_MAX == block) {
            Some(value) => Ok(Outcome::Found(value, None)),
            None => {
                let message =
                    format!("a read of block {block} returned bytes that no client has written there");
                Err(failure(Ran::No, FailureKind::Wrong, message))
            }
        }
    }
}

/// Whether an error means that the client was fenced.
fn is_fenced(error: &BlocksError) -> bool {
    matches!(error, BlocksError::Fabric(error) if error.is_fenced())
}

fn failure(ran: Ran, kind: FailureKind, message: String) -> Failure {
    Failure { ran, kind, message }
}

impl From<BlocksError> for Failure {
    fn from(error: BlocksError) -> Failure {
        let (ran, message) = (error.ran(), error.to_string());
        let kind = match &error {
            BlocksError::NoMajority { reason, .. } if is_fenced(reason) => FailureKind::Over,
            BlocksError::NoMajority { .. } | BlocksError::Locked { .. } | BlocksError::Busy { .. } => {
                FailureKind::Declined
            }
            BlocksError::NotKept { .. } => FailureKind::Over,
            BlocksError::NoWriterId(_) => FailureKind::NoIds,
            BlocksError::Refused(status) => {
                let message = format!("a client was denied an access that it is allowed: {status}");
                return failure(ran, FailureKind::Refused, message);
            }
            _ => FailureKind::Wrong,
        };
        failure(ran, kind, message)
    }
}
