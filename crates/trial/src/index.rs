//! The family of ordered indexes. An index is a map from keys to values that also returns its keys in order.
//!
//! The store lies on all nodes: each client has a session with each of them, and its tasks share one client of the
//! system. An index has no replicas, so the loss of one node's memory is the loss of the index: an operator then
//! creates another one.
//!
//! - `keys` draws the keys. They are few and share many prefixes, so that nodes split and grow all the time.
//! - `registered`: the registered indexes, with the options that trials draw for them.
//! - `stand_ins`: other systems as indexes, by which tests check the family itself.
//!
//! In the history, a key is its place in the order of all keys. Each value proves itself ([`crate::values`]), so torn
//! bytes are detected, and no two writes have the same value. After the faults have ended, a client reads and deletes
//! each key and scans everything. Then no lock may be held.
//!
//! Invariant: an operation without a known outcome never ends in the history. Another client may complete it at any
//! later time: one that recovers its client.

pub mod keys;

mod registered;
mod stand_ins;

pub use stand_ins::stand_ins;

use crate::family::{Failure, FailureKind, Family, Seat};
use crate::flight::{Phase, Phases, Request, Tracked};
use crate::systems::System;
use crate::{Choice, Drawn, Scene, leaves, values};
use farside_remote::control::{self, Store};
use farside_remote::fabric::Ran;
use farside_remote::wire::Code;
use farside_remote::{ChainView, FabricError, NodeId, Width};
use farside_sim::fault::Fault;
use farside_sim::history::map::{Ask, Item, Outcome};
use farside_sim::history::register::Value;
use farside_sim::linearizable::Limits;
use farside_sim::node::Node;
use farside_sim::ordered::Maps;
use farside_sim::random::Random;
use farside_sim::world::{MICROS, MILLIS, Nanos, Turnstile};
use farside_systems::index::{Index, IndexError, Keys};
use farside_systems::lease::LeaseError;
use farside_systems::members;
use farside_systems::store::{Members, StoreError};
use farside_systems::system::{Options, Sizing};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::rc::Rc;

/// A client of an index, as trials open it.
#[allow(async_fn_in_trait, reason = "a client belongs to one thread: no Send bound is wanted")]
pub(crate) trait Opened: Index + Sized + 'static {
    /// Largest number of members of a store.
    const MEMBERS_MAX: u64;
    /// Whether a store may have strings as keys.
    const HAS_STRINGS: bool;
    /// Whether the system offers [`Index::put_if_absent`].
    const ADDS: bool;
    /// Whether the client goes on over the next session with a node, whose key it fetches again.
    const GOES_ON: bool;
    /// Whether the client's own task carries out the operations that change the index.
    const IS_KEPT: bool;
    /// Memory of each member in MiB: enough, and so little that it is exhausted.
    const MEMBER_MIB: [u64; 2];

    /// Draws the options of a store of this kind with such keys, and of its clients.
    fn drawn(kind: &str, drawn: &Drawn, random: &Random, keys: Keys) -> Setting;

    /// Phases of the protocol of stores of this kind. One of them allocates.
    fn phases(_kind: &str) -> &'static Phases {
        &PHASES
    }

    /// Creates a client of the store that `members` describe, in a pool of `nodes` nodes.
    async fn open(
        fabric: Tracked,
        nodes: u32,
        members: &Members,
        options: &Options,
    ) -> Result<Self, StoreError>;

    /// Creates the same client for another task.
    async fn another(&self) -> Result<Self, StoreError>;

    /// Repairs what dead clients have left.
    async fn heal(&mut self) -> Result<(), IndexError>;

    /// Returns the locks at one member that are not free, as their places and their words. No client uses the store.
    /// `load` returns the 8-byte word at an address. By default returns none: then a lock that nobody frees is found by
    /// the last client, whose deletes take the lock of each key.
    fn held(_store: &Store, _load: impl Fn(u64) -> u64) -> Result<Vec<(u64, u64)>, String> {
        Ok(Vec::new())
    }

    /// Returns descriptions of the memory that is lost, or used twice. No client uses the store, and all dead ones were
    /// recovered. `load` returns the 8-byte word at an address of a member, by its index. By default returns none.
    fn strays(_stores: &[Store], _load: impl Fn(usize, u64) -> u64) -> Result<Vec<String>, String> {
        Ok(Vec::new())
    }
}

/// The options of a system that a seed has drawn.
pub(crate) struct Setting {
    pub(crate) sizing: Sizing,
    /// Options of each client, but for its entropy.
    pub(crate) options: Options,
    /// Whether a dead client keeps no other one from working: its locks expire, or it has none.
    pub(crate) survives_deaths: bool,
    /// Whether clients have leases, so that pauses may outlast these.
    pub(crate) has_leases: bool,
    /// Whether the lines of a WRITE may land in any order; `None` if the system works in either case.
    pub(crate) relaxed: Option<bool>,
    /// The drawn options, for reports.
    pub(crate) choices: Vec<Choice>,
}

/// An index whose clients are of the type `C`, with the options that a seed has drawn for it.
pub(crate) struct Indexed<C> {
    setting: Setting,
    kind: Keys,
    /// All keys in order.
    keys: Vec<Vec<u8>>,
    /// Places of the keys that have many operations.
    hot: Vec<u64>,
    /// Number of places at which a scan may begin: that after the last key is one, unless no key is larger.
    starts: u64,
    /// Longest value, unless the system's limit is lower.
    value_max: u64,
    /// Whether most operations put keys that are rarely deleted, so that nodes become large.
    grows: bool,
    /// Whether many operations delete, so that memory is used again.
    churns: bool,
    /// Whether at times all clients use the same key for a while, so that they combine their requests and compete.
    bursts: bool,
    /// If most operations add, the next key to be put, so that all keys are.
    next: Cell<u64>,
    /// The key of the current burst, and the number of its operations that are yet to begin.
    burst: Cell<(u64, u64)>,
    /// One in this many operations is a scan.
    scan_one_in: u64,
    /// One in this many operations is the last one of its client.
    leave_one_in: u64,
    /// Whether the store has little memory.
    is_tight: bool,
    /// Index of the phase in which clients claim memory.
    claim: usize,
    /// Sums of all clients' counters.
    counters: RefCell<BTreeMap<&'static str, u64>>,
    clients: PhantomData<fn() -> C>,
}

/// Client of one task.
pub(crate) struct Client<C> {
    index: C,
    shared: Shared<C>,
    scene: Rc<Scene>,
}

/// What the tasks of one client share.
pub(crate) struct Shared<C>(Rc<All<C>>);

struct All<C> {
    /// Lets one task at a time open the store.
    gate: Turnstile,
    /// The client of the task that has opened the store.
    first: RefCell<Option<C>>,
    /// Whether the client is to close its sessions.
    leaves: Cell<bool>,
    /// Whether the client's own task runs.
    is_kept: Cell<bool>,
    /// The client's counters, as of the last operation.
    counted: RefCell<Vec<(&'static str, u64)>>,
}

impl<C> Clone for Shared<C> {
    fn clone(&self) -> Shared<C> {
        Shared(Rc::clone(&self.0))
    }
}

impl<C> Default for Shared<C> {
    fn default() -> Shared<C> {
        Shared(Rc::new(All {
            gate: Turnstile::default(),
            first: RefCell::new(None),
            leaves: Cell::new(false),
            is_kept: Cell::new(false),
            counted: RefCell::default(),
        }))
    }
}

/// Number of keys with few operations, for each key with many, if there are few keys.
const COLD: u64 = 8;
/// Number of keys with many operations.
const HOT_MAX: u64 = 8;
/// In trials with bursts, one in this many operations begins one. Minimum and maximum number of its operations.
const BURST_ONE_IN: u64 = 8;
const BURST: [u64; 2] = [10, 100];
/// Largest number of concurrent operations of a trial with bursts. The check of a key takes too long if there are more.
const BURSTING_MAX: u32 = 8;
/// Largest number of concurrent operations for each key with many.
const CONCURRENT_MAX: u32 = 20;
/// Limits of the check of a key. Many operations have no known outcome.
const LIMITS: Limits = Limits { operations_max: 5_000, steps_max: 8_000_000 };
/// One in this many operations is followed by the recovery of all dead clients.
const HEAL_ONE_IN: u64 = 40;
/// One in this many operations whose request was lost makes the client open its sessions anew.
const REOPENS_ONE_IN: u64 = 3;
/// Length of the shortest value, which has room for a tag.
const VALUE_MIN: u64 = 8;

/// Indices of the phases. The idle phase is the first.
const READ: usize = 1;
const LOCK: usize = 2;
const WRITE: usize = 3;
const INSTALL: usize = 4;
const CLAIM: usize = 5;
const FENCE: usize = 6;
const CATALOG: usize = 7;

/// The phases are in the order of the constants. A request that reads and swaps takes a lock, or looks what it holds.
static PHASES: Phases = Phases {
    all: &[
        Phase::new("idle").rare(),
        Phase::new("read"),
        Phase::new("lock"),
        Phase::new("write"),
        Phase::new("install"),
        // A client that claims memory reads which chunk to try first, by a FETCH-ADD.
        Phase::allocating("claim").rare(),
        Phase::new("fence").rare().led_to_by(LOCK),
        Phase::new("catalog").rare(),
    ],
    of: |request, _| match request {
        Request::Call(_, request) => match serde_json::from_slice(request) {
            Ok(control::Ask::Fence { .. }) => FENCE,
            _ => CATALOG,
        },
        Request::Chain(chain) => phase_of(chain),
    },
};

/// Phases of an index whose nodes are changed under locks that lie apart. A request with a CAS alone takes or frees a
/// lock, or changes the root.
static LOCKED_PHASES: Phases = Phases {
    all: &[
        Phase::new("idle").rare(),
        Phase::new("read"),
        Phase::new("lock"),
        Phase::new("write"),
        Phase::allocating("claim").rare(),
        Phase::new("fence").rare().led_to_by(LOCK),
        Phase::new("catalog").rare(),
    ],
    of: |request, passed| match (PHASES.of)(request, passed) {
        phase @ (READ | LOCK | WRITE) => phase,
        INSTALL => LOCK,
        // The phases after this one come one earlier.
        later => later - 1,
    },
};

/// Returns the phase of a chain, by the kinds of its ops.
fn phase_of(chain: ChainView<'_>) -> usize {
    let has = |code: Code| chain.ops().any(|op| op.code() == code);
    match (has(Code::Cas), has(Code::Read), has(Code::Write)) {
        _ if has(Code::FetchAdd) => CLAIM,
        (true, true, _) => LOCK,
        (true, false, _) => INSTALL,
        (false, _, true) => WRITE,
        (false, _, false) => READ,
    }
}

impl<C: Opened> Family for Indexed<C> {
    type Ask = Ask;
    type Client = Client<C>;
    type Shared = Shared<C>;
    type Checker = Maps;

    const SPANS: bool = true;
    const IS_REPLICATED: bool = false;
    /// Clients combine the requests of their concurrent operations.
    const TASKS_MAX: u64 = 6;

    fn drawn_nodes(_system: System, random: &Random) -> u32 {
        random.between(1, C::MEMBERS_MAX) as u32
    }

    fn drawn(system: System, drawn: &Drawn, random: &Random) -> Indexed<C> {
        let claim = C::phases(system.kind()).all.iter().position(|phase| phase.allocates);
        let kind = if C::HAS_STRINGS && random.one_in(2) { Keys::Strings } else { Keys::Numbers };
        let setting = C::drawn(system.kind(), drawn, random, kind);
        let count = if drawn.keys > HOT_MAX { drawn.keys } else { drawn.keys * (1 + COLD) };
        let keys = keys::drawn(random, kind, count as usize);
        let starts =
            keys.len() as u64 + u64::from(keys::after(kind, keys.last().map(Vec::as_slice)).is_some());
        let hot_min = u64::from((drawn.clients * drawn.tasks).div_ceil(CONCURRENT_MAX));
        let hot =
            (0..drawn.keys.min(HOT_MAX).max(hot_min)).map(|_| random.below(keys.len() as u64)).collect();
        Indexed {
            setting,
            kind,
            hot,
            starts,
            value_max: [VALUE_MIN, 24, 200, 2_000][random.below(4) as usize],
            grows: random.one_in(if drawn.is_crowded { 2 } else { 6 }),
            churns: random.one_in(3),
            bursts: random.one_in(2) && drawn.clients * drawn.tasks <= BURSTING_MAX,
            burst: Cell::default(),
            next: Cell::new(0),
            scan_one_in: [3, 6, 20][random.below(3) as usize],
            leave_one_in: [0, 10, 40][random.below(3) as usize],
            is_tight: drawn.faults.contains(&Fault::Exhaustion),
            claim: claim.expect("clients claim memory"),
            keys,
            counters: RefCell::default(),
            clients: PhantomData,
        }
    }

    fn is_owned(&self) -> bool {
        C::IS_KEPT
    }

    /// Memory that a delete has freed is used again only if the trial lasts for a while.
    fn rest(&self) -> Nanos {
        if self.churns { 50 * MICROS } else { 5 * MICROS }
    }

    fn goes_on(&self) -> bool {
        C::GOES_ON
    }

    /// Without leases, the locks of a dead client are held for ever.
    fn survives(&self, fault: Fault) -> bool {
        fault != Fault::ClientDeath || self.setting.survives_deaths
    }

    fn relaxed(&self) -> Option<bool> {
        self.setting.relaxed
    }

    fn options(&self) -> Vec<Choice> {
        let Indexed { value_max, grows, churns, bursts, scan_one_in, leave_one_in, ref keys, .. } = *self;
        let kind = if self.kind == Keys::Numbers { "numbers" } else { "strings" };
        let mut choices = vec![
            Choice::new("key_kind", kind, format!("keys are {} {kind}", keys.len())),
            Choice::new("all_keys", keys.len(), format!("{} of them hot", self.hot.len())),
            Choice::new("value_max", value_max, format!("values up to {value_max} bytes")),
            Choice::new(
                "grows",
                grows,
                (if grows { "most operations add" } else { "mixed operations" }).into(),
            ),
            Choice::new("churns", churns, (if churns { "many deletes" } else { "few deletes" }).into()),
            Choice::new("bursts", bursts, (if bursts { "keys in bursts" } else { "no bursts" }).into()),
            Choice::new("scan_one_in", scan_one_in, format!("scans 1 in {scan_one_in}")),
            Choice::new("leave_one_in", leave_one_in, leaves(leave_one_in)),
        ];
        let own = self.setting.choices.iter();
        choices.extend(own.map(|own| Choice::new(own.name, own.value.clone(), own.words.clone())));
        choices
    }

    fn parameters(&self) -> String {
        String::new()
    }

    fn quota_mib(&self, drawn: &Drawn) -> Option<u64> {
        let [enough, little] = C::MEMBER_MIB;
        Some(if self.is_tight { little } else { enough } * u64::from(drawn.nodes))
    }

    fn sizing(&self) -> Sizing {
        self.setting.sizing
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.counters.borrow().iter().map(|(name, count)| (*name, *count)).collect()
    }

    /// Although clients use chains only, an operation does not end with its session: others may complete it.
    fn is_one_sided(&self) -> bool {
        false
    }

    fn long_pause_one_in(&self, random: &Random) -> u64 {
        if self.setting.has_leases { random.between(2, 4) } else { 0 }
    }

    fn phases(system: System) -> &'static Phases {
        C::phases(system.kind())
    }

    /// The client's own task claims memory, after which it may read which memory was freed.
    fn exhausted_in(&self, _last: usize) -> usize {
        self.claim
    }

    fn checker(&self) -> Maps {
        Maps(LIMITS)
    }

    async fn open(
        &self,
        seat: Seat<'_, Indexed<C>>,
        _node: NodeId,
        name: &str,
    ) -> Result<Client<C>, Failure> {
        let (scene, shared, fabric) = (seat.scene, seat.shared.clone(), seat.fabric());
        let _passage = shared.0.gate.enter().await;
        let nodes = scene.sites.len() as u32;
        let first = shared.0.first.borrow_mut().take();
        if let Some(first) = first {
            let another = first.another().await;
            *shared.0.first.borrow_mut() = Some(first);
            let index = another.map_err(|error| failed::<C>(scene, error.into()))?;
            return Ok(Client { index, shared: shared.clone(), scene: Rc::clone(scene) });
        }
        let opened = async {
            let members = members::open(&fabric, nodes, name).await?;
            let options = self.options_of_client(scene);
            C::open(fabric, nodes, &members, &options).await
        };
        let index = opened.await.map_err(|error: StoreError| failed::<C>(scene, error.into()))?;
        let (theirs, keeper) = (shared.clone(), index.keeper());
        theirs.0.is_kept.set(true);
        scene.world.spawn(seat.process, async move {
            keeper.await;
            theirs.0.is_kept.set(false);
        });
        let another = index.another().await.map_err(|error| failed::<C>(scene, error.into()))?;
        *shared.0.first.borrow_mut() = Some(another);
        Ok(Client { index, shared: shared.clone(), scene: Rc::clone(scene) })
    }

    /// Closes the client. Its own task ends once it has freed the client's locks, so this waits for the end of all
    /// outages.
    async fn leave(&self, scene: &Scene, shared: &Shared<C>) {
        while C::IS_KEPT && scene.outages.are_going_on(scene) {
            scene.world.sleep(MILLIS).await;
        }
        shared.0.first.take();
        while shared.0.is_kept.get() {
            scene.world.sleep(MILLIS / 10).await;
        }
    }

    fn draw(&self, scene: &Scene, client: &mut Client<C>) -> (u64, Ask) {
        let random = scene.world.random();
        let (key, is_of_burst) = self.draw_key(random);
        if !is_of_burst && random.one_in(self.scan_one_in) {
            let from = [0, key, random.below(self.starts)][random.below(3) as usize];
            let limit = if random.one_in(2) { random.between(1, 6) } else { self.keys.len() as u64 + 1 };
            return (from, self.scan(from, limit));
        }
        let value = || {
            let most = (client.index.value_max() as u64).min(self.value_max);
            let short = random.between(VALUE_MIN, most.min(24));
            let len = if random.one_in(2) { short } else { random.between(VALUE_MIN, most) };
            Value { tag: scene.next_tag(), len: len as u32 }
        };
        let ask = match random.below(16) {
            0..8 if is_of_burst => Ask::Get,
            0..4 => Ask::Get,
            4..8 if self.churns => Ask::Delete,
            4..6 if !self.grows => Ask::Delete,
            6..9 if C::ADDS => Ask::PutIfAbsent(value()),
            9 if random.one_in(4) => Ask::Delete,
            _ => Ask::Put(value()),
        };
        (key, ask)
    }

    async fn perform(
        &self,
        scene: &Scene,
        client: &mut Client<C>,
        _who: u32,
        key: u64,
        ask: &Ask,
    ) -> Result<Outcome, Failure> {
        let performed = self.carry_out(scene, &mut client.index, key, ask).await;
        self.count(client);
        match performed {
            Ok(outcome) => outcome.map_err(|message| failure(Ran::Unknown, FailureKind::Wrong, message)),
            Err(error) => {
                let failure = failed::<C>(scene, error);
                if failure.kind == FailureKind::Declined {
                    // A node that is down refuses requests at once.
                    scene.world.sleep(scene.world.random().heavy(MILLIS / 10)).await;
                }
                Err(failure)
            }
        }
    }

    /// At times recovers the dead clients that are in nobody's way, or makes the client close its sessions.
    async fn trespass(&self, scene: &Scene, client: &mut Client<C>) -> Result<(), Failure> {
        if self.setting.has_leases && scene.world.random().one_in(HEAL_ONE_IN) {
            let healed = self.recover(client).await;
            // A recovery fails if a node does not answer.
            healed
                .or_else(|failure| if failure.kind == FailureKind::Wrong { Err(failure) } else { Ok(()) })?;
        }
        let leaves = &client.shared.0.leaves;
        leaves.set(leaves.get() || scene.world.random().one_in(self.leave_one_in));
        match leaves.get() {
            true => Err(failure(Ran::No, FailureKind::Over, "the client leaves".to_owned())),
            false => Ok(()),
        }
    }

    async fn heal(&self, _scene: &Scene, client: &mut Client<C>) -> Result<(), Failure> {
        self.recover(client).await
    }

    /// Reads each key and scans all. Then deletes each key: that needs its lock, but no memory.
    fn read_all(&self, scene: &Scene) -> Vec<(u64, Ask)> {
        let count = self.keys.len() as u64;
        let middle = scene.world.random().below(count);
        let all = || (0, self.scan(0, count + 1));
        let gets = (0..count).map(|key| (key, Ask::Get));
        let deletes = (0..count).map(|key| (key, Ask::Delete));
        gets.chain([all(), (middle, self.scan(middle, 5))]).chain(deletes).chain([all()]).collect()
    }

    /// Checks that nobody holds a lock and, at the first node, that no memory is lost. All clients have left, and the
    /// dead ones were recovered.
    async fn audit(&self, scene: &Scene, node: &Node, store: &str) -> Result<(), String> {
        let found = description(node, store).await?;
        let memory = node.memory();
        let held = C::held(&found, |at| memory.load(at, Width::W8) as u64)?;
        if !held.is_empty() {
            return Err(format!("after all clients have left, locks are held (place, word): {held:x?}"));
        }
        if node.id() != scene.sites[0].node.id() {
            return Ok(());
        }
        let mut members = Vec::new();
        for site in &scene.sites {
            let found = description(&site.node, store).await?;
            let index = found.membership.as_ref().map_or(0, |of| of.index);
            members.push((index, found, site.node.memory()));
        }
        members.sort_by_key(|(index, ..)| *index);
        let stores: Vec<Store> = members.iter().map(|(_, store, _)| store.clone()).collect();
        let strays = C::strays(&stores, |member, at| members[member].2.load(at, Width::W8) as u64)?;
        match strays.is_empty() {
            true => Ok(()),
            false => Err(format!("after all clients have left, memory is lost: {strays:?}")),
        }
    }
}

impl<C: Opened> Indexed<C> {
    /// Draws a key, and whether it is that of a burst.
    fn draw_key(&self, random: &Random) -> (u64, bool) {
        let (key, left) = self.burst.get();
        if let Some(left) = left.checked_sub(1) {
            self.burst.set((key, left));
            return (key, true);
        }
        let any = random.below(self.keys.len() as u64);
        let hot = self.hot[random.below(self.hot.len() as u64) as usize];
        let key = match self.grows {
            true if random.one_in(2) => self.next.replace((self.next.get() + 1) % self.keys.len() as u64),
            false if random.one_in(2) => hot,
            _ => any,
        };
        if self.bursts && random.one_in(BURST_ONE_IN) {
            self.burst.set((key, random.between(BURST[0], BURST[1])));
        }
        (key, false)
    }

    /// Options of a new client.
    fn options_of_client(&self, scene: &Scene) -> Options {
        Options { entropy: scene.world.random().bits(), ..self.setting.options }
    }

    /// A scan from the key at this place on.
    fn scan(&self, from: u64, limit: u64) -> Ask {
        Ask::Scan { keys: self.keys.len() as u64 - from, limit: limit as u32 }
    }

    /// Recovers all dead clients.
    async fn recover(&self, client: &mut Client<C>) -> Result<(), Failure> {
        let Client { index, scene, .. } = client;
        let healed = index.heal().await;
        healed.map_err(|error| failed::<C>(scene, error))
    }

    /// Carries out an operation. The inner error is a violation.
    async fn carry_out(
        &self,
        scene: &Scene,
        index: &mut C,
        key: u64,
        ask: &Ask,
    ) -> Result<Result<Outcome, String>, IndexError> {
        if let Ask::Scan { limit, .. } = *ask {
            return self.carry_out_scan(scene, index, key, limit as usize).await;
        }
        let bytes = &self.keys[key as usize];
        Ok(match *ask {
            Ask::Get => match index.get(bytes).await? {
                None => Ok(Outcome::Absent),
                Some(found) => value_of(scene, found).map(Outcome::Found),
            },
            Ask::Put(value) => {
                index.put(bytes, &values::bytes(value)).await?;
                Ok(Outcome::Done)
            }
            Ask::PutIfAbsent(value) => match index.put_if_absent(bytes, &values::bytes(value)).await? {
                true => Ok(Outcome::Done),
                false => Ok(Outcome::Present),
            },
            Ask::Delete => match index.delete(bytes).await? {
                true => Ok(Outcome::Done),
                false => Ok(Outcome::Absent),
            },
            Ask::Scan { .. } => unreachable!("scans are handled above"),
        })
    }

    /// Carries out a scan that sees the keys from this place on. It begins at this key, or between it and the one
    /// before.
    async fn carry_out_scan(
        &self,
        scene: &Scene,
        index: &mut C,
        first: u64,
        limit: usize,
    ) -> Result<Result<Outcome, String>, IndexError> {
        let before = first.checked_sub(1).map(|before| &self.keys[before as usize][..]);
        let from = match self.keys.get(first as usize).filter(|_| scene.world.random().one_in(2)) {
            Some(key) => key.clone(),
            None => keys::after(self.kind, before).expect("scans begin where a key is possible"),
        };
        let (mut items, mut wrong) = (Vec::new(), None);
        let visit = |key: &[u8], found: &[u8]| {
            let place = self.keys.binary_search_by(|known| known[..].cmp(key));
            let place = place.map_err(|_| format!("a scan returned the key {key:x?}, which nobody has put"));
            let item = place.and_then(|place| {
                let value = value_of(scene, found)?;
                Ok(Item { distance: place as i64 - first as i64, value })
            });
            match item {
                Ok(item) => items.push(item),
                Err(violation) => drop(wrong.get_or_insert(violation)),
            }
        };
        let count = index.scan(&from, limit, visit).await?;
        if wrong.is_none() && count != items.len() {
            wrong =
                Some(format!("a scan visited {} keys, and returned that it visited {count}", items.len()));
        }
        Ok(wrong.map_or(Ok(Outcome::Scanned(items)), Err))
    }

    /// Adds what a client has counted since its last operation.
    fn count(&self, client: &Client<C>) {
        let (now, mut before) = (client.index.counters(), client.shared.0.counted.borrow_mut());
        let mut sums = self.counters.borrow_mut();
        for (place, &(name, count)) in now.iter().enumerate() {
            let counted = before.get(place).map_or(0, |(_, count)| *count);
            *sums.entry(name).or_default() += count.saturating_sub(counted);
        }
        *before = now;
    }
}

/// Returns the description of a store in a node's catalog.
async fn description(node: &Node, store: &str) -> Result<Store, String> {
    match node.answer(control::Ask::OpenStore { name: store.to_owned() }).await? {
        control::Answer::Store(store) => Ok(store),
        other => Err(format!("{other:?}")),
    }
}

/// Returns the value with these bytes.
///
/// # Errors
/// The bytes are torn, or nobody has put them.
fn value_of(scene: &Scene, found: &[u8]) -> Result<Value, String> {
    let value = values::known(found).filter(|value| (1..=scene.tags.get()).contains(&value.tag));
    value.ok_or_else(|| format!("a read returned {} bytes that nobody has put", found.len()))
}

/// Returns the failure of an operation.
fn failed<C: Opened>(scene: &Scene, error: IndexError) -> Failure {
    let (ran, message) = (error.ran(), error.to_string());
    let kind = match &error {
        IndexError::OutOfMemory => FailureKind::OutOfMemory,
        IndexError::Busy => FailureKind::Declined,
        IndexError::NotKept { .. } | IndexError::Lost | IndexError::Lease(LeaseError::Lost) => {
            FailureKind::Over
        }
        IndexError::Lease(LeaseError::NoneFree) => FailureKind::NoIds,
        IndexError::Lease(LeaseError::Refused(status)) | IndexError::Refused { status, .. } => {
            let message = format!("a client was denied an access that it is allowed: {status}");
            return failure(ran, FailureKind::Refused, message);
        }
        // An operator that does not reach the first member drops the others, which is a loss for those that still find
        // the first one.
        IndexError::Store(StoreError::MemoryLost { .. })
            if [Fault::NodeLoss, Fault::Revocation].iter().all(|fault| scene.struck.of(*fault) == 0) =>
        {
            return failure(ran, FailureKind::Wrong, format!("no node has lost its memory: {message}"));
        }
        IndexError::Store(StoreError::Fabric(error))
        | IndexError::Lease(LeaseError::Fabric(error))
        | IndexError::Fabric(error) => lost::<C>(scene, error),
        IndexError::Unsettled(error) => return Failure { ran, ..failed::<C>(scene, (**error).clone()) },
        IndexError::Store(_) => FailureKind::Over,
        IndexError::Lease(LeaseError::Exhausted)
        | IndexError::KeyLength { .. }
        | IndexError::ZeroByte
        | IndexError::ValueLength { .. }
        | IndexError::Damaged(_) => FailureKind::Wrong,
    };
    failure(ran, kind, message)
}

/// Returns what follows from a lost request. The pool opens the next session itself, so most clients may go on.
fn lost<C: Opened>(scene: &Scene, error: &FabricError) -> FailureKind {
    match !C::GOES_ON || error.is_fenced() || scene.world.random().one_in(REOPENS_ONE_IN) {
        true => FailureKind::Over,
        false => FailureKind::Declined,
    }
}

fn failure(ran: Ran, kind: FailureKind, message: String) -> Failure {
    Failure { ran, kind, message }
}
