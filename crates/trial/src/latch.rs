//! The family of latched objects. Each object of a store is a counter, which clients change under its latch.
//!
//! The checks share no code with the schemes:
//! - the content of an object follows from its value, so torn bytes are detected;
//! - each client that is inside an operation that holds a latch is noted, so two writers at once are detected; in a
//!   store with leases, the earlier one must then not succeed;
//! - the checker of counters finds lost updates and stale reads;
//! - after the faults have ended, no latch may be held.
//!
//! The tasks of a session share one client of the system, whose own task releases the latches of operations whose
//! futures are dropped. A latch has no owner: if a client dies or loses its session with a latch, nobody can use the
//! object any more. The trial then creates the store anew, as an operator would. In a store with leases, the other
//! clients recover the latches of such a client, and no latch may be held at the end.
//!
//! Invariant: in a store with leases, an addition without a known outcome never ends in the history. A recovery may
//! carry it out at any later time, also after its client's death.
//!
//! In a store without leases, an operation whose WRITE is not awaited returns, in the history, when its caller goes on.
//! This is more than a scheme promises. It holds as long as no session ends, because the latch is held until the WRITE
//! has landed. In a store with leases, it returns when the WRITE has completed.

use crate::family::{Failure, FailureKind, Family, Seat};
use crate::flight::{Phase, Phases, Request, Tracked};
use crate::systems::System;
use crate::values::mixed;
use crate::{Choice, Drawn, Scene, Site, create_next_store};
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use farside_remote::wire::{Code, OpHeader};
use farside_remote::{ChainView, Fabric, FabricError, NodeId, Width, control};
use farside_sim::counter::Counters;
use farside_sim::fault::Fault;
use farside_sim::history::counter::{Ask, Outcome, Value};
use farside_sim::node::Node;
use farside_sim::random::Random;
use farside_sim::world::{MICROS, Nanos, Turnstile, World};
use farside_systems::latch::system::LatchKind;
use farside_systems::latch::{self, LatchError, Latched, LeaseSpec, Placement, Scheme, Spec};
use farside_systems::lease::LeaseError;
use farside_systems::redo::RedoError;
use farside_systems::store;
use farside_systems::system::{Backoff, Options, System as _};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// Time for which clients try to take a latch: a few thousand round trips.
pub(crate) const PATIENCE: Duration = Duration::from_millis(10);

/// Latched objects, with the options that a seed has drawn for them.
pub(crate) struct Latch {
    spec: Spec,
    backoff: Backoff,
    stores: Stores,
}

/// The stores of latched objects that clients have opened, by node and name.
#[derive(Default)]
pub(crate) struct Stores(RefCell<BTreeMap<(NodeId, String), Rc<Known>>>);

/// A store that clients have opened.
#[derive(Default)]
pub(crate) struct Known {
    holders: Holders,
    /// Number of clients that had died before a client opened the store.
    deaths_before: u64,
    /// Whether a client has lost its session while it may have held a latch.
    pub(crate) has_lost_session: Cell<bool>,
    is_replaced: Cell<bool>,
}

impl Known {
    /// Whether clients recover the latches of dead ones.
    pub(crate) fn has_leases(&self) -> bool {
        self.holders.has_leases
    }

    /// Whether a client may have left a latch behind.
    fn has_orphans(&self, scene: &Scene) -> bool {
        let has_lost =
            self.has_lost_session.get() || scene.struck.of(Fault::ClientDeath) > self.deaths_before;
        has_lost && !self.holders.has_leases
    }

    /// If a client may have left a latch behind, creates the store anew after a while.
    pub(crate) fn replace_orphaned(self: &Rc<Self>, scene: &Rc<Scene>, site: usize, name: &str) {
        if !self.has_orphans(scene) || self.is_replaced.replace(true) {
            return;
        }
        let (known, theirs, name) = (Rc::clone(self), Rc::clone(scene), name.to_owned());
        let site = Rc::clone(&scene.sites[site]);
        let at = scene.world.now() + scene.world.random().heavy(REPLACED_AFTER);
        scene.world.at(at, move || {
            if !site.node.is_served() {
                return known.is_replaced.set(false);
            }
            if site.store_name() == name && !theirs.is_over() {
                site.node.ask(control::Ask::DropStore { name });
                create_next_store(&theirs, &site);
            }
        });
    }
}

impl Stores {
    /// Opens the store `name` at `node`, and returns a handle of the session's client. `options` has the pauses between
    /// attempts, and whether the store has leases.
    pub(crate) async fn open<F: Family<Shared = Shared>>(
        &self,
        seat: &Seat<'_, F>,
        node: NodeId,
        name: &str,
        options: (Backoff, bool),
    ) -> Result<(Opened, Latched<Tracked>), Failure> {
        let (Seat { scene, site, process, shared, .. }, (backoff, has_leases)) = (seat, options);
        let _passage = shared.gate.enter().await;
        let deaths_before = scene.struck.of(Fault::ClientDeath);
        let holders = || Holders::new(has_leases);
        let new = || Rc::new(Known { deaths_before, holders: holders(), ..Known::default() });
        let known = Rc::clone(self.0.borrow_mut().entry((node, name.to_owned())).or_insert_with(new));
        known.replace_orphaned(scene, site.index, name);
        let opened = Opened {
            scene: Rc::clone(scene),
            site: site.index,
            store: name.to_owned(),
            known: Rc::clone(&known),
        };
        let another = shared.clients.borrow().get(name).map(Latched::another);
        if let Some(latched) = another {
            return Ok((opened, latched));
        }
        let fabric = seat.fabric();
        let found = store::fetch_of(&fabric, node, name, latch::KIND).await?;
        let entropy = scene.world.random().bits();
        let (backoff, patience) = (Some(backoff), Some(PATIENCE));
        let options = Options { entropy, backoff, patience, ..Options::NONE };
        let client = LatchKind::open(fabric, &store::Members::one(node, found), &options).await?;
        let (keeper, kept) = (client.keeper(), Rc::clone(&shared.kept));
        kept.set(kept.get() + 1);
        scene.world.spawn(*process, async move {
            if keeper.await.is_err() {
                known.has_lost_session.set(true);
            }
            kept.set(kept.get() - 1);
        });
        let latched = client.another();
        shared.clients.borrow_mut().insert(name.to_owned(), client);
        Ok((opened, latched))
    }

    /// Whether a client may have left a latch behind in the present store of a node.
    pub(crate) fn are_orphaned(&self, scene: &Scene) -> bool {
        let is_lost = |site: &Rc<Site>| {
            let stores = self.0.borrow();
            stores.get(&(site.node.id(), site.store_name())).is_some_and(|known| known.has_orphans(scene))
        };
        scene.sites.iter().any(is_lost)
    }

    /// Checks that nobody holds a latch of a store, unless a client has left one behind. All clients have left.
    ///
    /// # Errors
    /// Returns a description of the latches that are held.
    pub(crate) async fn audit(&self, scene: &Scene, node: &Node, store: &str) -> Result<(), String> {
        let found = node.answer(control::Ask::OpenStore { name: store.to_owned() }).await?;
        let control::Answer::Store(store) = found else { return Err(format!("{found:?}")) };
        let memory = node.memory();
        let held = latch::held(&store, |at| memory.load(at, Width::W8) as u64)?;
        let stores = self.0.borrow();
        let is_lost = |known: &Rc<Known>| known.has_orphans(scene);
        if held.is_empty() || stores.get(&(node.id(), store.name)).is_some_and(is_lost) {
            return Ok(());
        }
        Err(format!("after all clients have left, latches are held (object, word): {held:x?}"))
    }
}

/// A store that a task has opened, and where it is.
pub(crate) struct Opened {
    scene: Rc<Scene>,
    /// Index of the site, and name of the store.
    site: usize,
    store: String,
    pub(crate) known: Rc<Known>,
}

impl Opened {
    /// Returns how an operation has ended, whose outcome without an effect is `failed`. `is_of_fabric` says whether an
    /// error is that of a lost request. If a client may have left a latch behind, creates the store anew after a while.
    ///
    /// # Errors
    /// The operation has failed, and may have been carried out, or the session has ended.
    pub(crate) fn end<O, E: Into<Failure>>(
        &self,
        performed: Result<O, Wrong<E>>,
        is_of_fabric: impl FnOnce(&E) -> bool,
        failed: O,
    ) -> Result<O, Failure> {
        let outcome = performed.map_err(|wrong| match wrong {
            Wrong::Error(error) => {
                if is_of_fabric(&error) {
                    self.known.has_lost_session.set(true);
                }
                error.into()
            }
            Wrong::Violation(message) => Failure { ran: Ran::Unknown, kind: FailureKind::Wrong, message },
        });
        self.known.replace_orphaned(&self.scene, self.site, &self.store);
        match outcome {
            Err(Failure { kind: FailureKind::Declined, ran: Ran::No, .. }) => Ok(failed),
            outcome => outcome,
        }
    }
}

/// Usual time, in nanoseconds, for which an operation that holds a latch waits before it ends.
const HOLDS: Nanos = 2 * MICROS;
/// Usual time, in nanoseconds, after which a store is created anew in which a latch may be held for ever.
const REPLACED_AFTER: Nanos = 100 * MICROS;
/// Pause, in nanoseconds, after which a task looks again whether the tasks of clients have ended.
const AGAIN: Nanos = 20 * MICROS;

/// One in this many operations on a store with leases is followed by the recovery of all dead clients.
pub(crate) const HEAL_ONE_IN: u64 = 40;

/// Indices of the phases. The idle phase is the first.
const READ: usize = 1;
const LATCH: usize = 2;
const WRITE: usize = 3;
const RELEASE: usize = 4;
const CATALOG: usize = 5;

/// The phases are in the order of the constants.
pub(crate) static PHASES: Phases = Phases {
    all: &[
        Phase::new("idle").rare(),
        Phase::new("read"),
        Phase::new("latch"),
        Phase::new("write"),
        Phase::new("release"),
        Phase::new("catalog").rare(),
    ],
    of: |request, _| match request {
        Request::Call(..) => CATALOG,
        Request::Chain(chain) => phase_of(chain),
    },
};

/// Returns the phase of a chain, by its ops. A FETCH-ADD alone may take or release a latch; what it adds is positive or
/// negative.
fn phase_of(chain: ChainView<'_>) -> usize {
    let ops: Vec<(Code, &OpHeader)> = chain.ops().map(|op| (op.code(), op.header())).collect();
    match ops[..] {
        [(Code::Write, _), ..] => WRITE,
        [(Code::Cas, _)] if frees(chain) => RELEASE,
        [(Code::Cas, _), ..] | [(Code::FetchAdd, _), _, ..] => LATCH,
        [(Code::FetchAdd, _)] => {
            let adds = chain.ops().next().map_or(0, |op| op.operands().last().copied().unwrap_or(0));
            if adds < 0x80 { LATCH } else { RELEASE }
        }
        _ => READ,
    }
}

/// Whether the first op of a chain is a CAS to 0: it releases a latch that has a lease.
fn frees(chain: ChainView<'_>) -> bool {
    chain
        .ops()
        .next()
        .is_some_and(|op| op.operands().len() == 16 && op.operands()[8..].iter().all(|&byte| byte == 0))
}

/// Encodes an object's content. All words follow from the value.
pub(crate) fn encode(value: Value, content: &mut [u8]) {
    let words = [value.count, value.tag].into_iter();
    let first = mixed(value.count.rotate_left(32) ^ value.tag);
    let filler = std::iter::successors(Some(first), |word| Some(mixed(word.wrapping_add(first))));
    for (place, word) in content.chunks_exact_mut(8).zip(words.chain(filler)) {
        place.copy_from_slice(&word.to_le_bytes());
    }
}

/// Decodes an object's content. Returns `None` if the bytes are those of no value, so that they are torn.
pub(crate) fn decode(content: &[u8]) -> Option<Value> {
    let word = |at: usize| content.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
    let value = Value { count: word(0)?, tag: word(8)? };
    let mut expected = vec![0; content.len()];
    if value != Value::default() {
        encode(value, &mut expected);
    }
    (content == expected).then_some(value)
}

/// The operations that hold the latches of a store's objects.
///
/// In a store with leases, an operation of a client that was fenced does not know that another client has its latch. It
/// is *overtaken*, and must not succeed.
#[derive(Default)]
pub(crate) struct Holders {
    /// Whether others may recover a latch while its holder does not know.
    has_leases: bool,
    inside: RefCell<Vec<Inside>>,
}

/// An operation that holds a latch.
#[derive(Clone)]
struct Inside {
    object: u64,
    is_writer: bool,
    is_overtaken: Rc<Cell<bool>>,
}

/// Notes that an operation holds a latch, until it is dropped.
pub(crate) struct Holder<'a> {
    holders: &'a Holders,
    of: Inside,
}

impl Holders {
    fn new(has_leases: bool) -> Holders {
        Holders { has_leases, ..Holders::default() }
    }

    /// Notes that an operation holds the latch of an object, until the returned value is dropped. Sets `is_overtaken`
    /// if another operation gets the latch before.
    ///
    /// # Errors
    /// Returns the violation if another operation excludes this one.
    fn enter(
        &self,
        object: u64,
        is_writer: bool,
        is_overtaken: &Rc<Cell<bool>>,
    ) -> Result<Holder<'_>, String> {
        let mut inside = self.inside.borrow_mut();
        let mut excluded = inside.iter().filter(|of| of.object == object && (of.is_writer || is_writer));
        if self.has_leases {
            excluded.for_each(|of| of.is_overtaken.set(true));
        } else if let Some(other) = excluded.next() {
            let name = |is_writer| if is_writer { "a writer" } else { "a reader" };
            return Err(format!(
                "{} holds the latch of object {object}, beside {}",
                name(is_writer),
                name(other.is_writer)
            ));
        }
        let of = Inside { object, is_writer, is_overtaken: Rc::clone(is_overtaken) };
        inside.push(of.clone());
        Ok(Holder { holders: self, of })
    }
}

impl Drop for Holder<'_> {
    fn drop(&mut self) {
        let mut inside = self.holders.inside.borrow_mut();
        let place = inside.iter().position(|of| Rc::ptr_eq(&of.is_overtaken, &self.of.is_overtaken));
        drop(place.map(|place| inside.swap_remove(place)));
    }
}

/// Reason why an operation has no outcome.
pub(crate) enum Wrong<E> {
    /// The client reported an error.
    Error(E),
    /// The client violated a property of the store.
    Violation(String),
}

impl<E> From<E> for Wrong<E> {
    fn from(error: E) -> Wrong<E> {
        Wrong::Error(error)
    }
}

/// How an operation is carried out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct How {
    /// Time, in nanoseconds, for which the operation holds the latch in addition to its requests.
    pub(crate) dwell_ns: Nanos,
    /// Whether a read holds the latch in any case.
    pub(crate) is_shared: bool,
}

impl How {
    /// Draws how an operation is carried out.
    pub(crate) fn drawn(random: &Random) -> How {
        let dwell_ns = if random.one_in(2) { random.heavy(HOLDS) } else { 0 };
        How { dwell_ns, is_shared: random.one_in(2) }
    }
}

/// Carries out an operation on an object, and checks what the client sees. In a store with leases, waits until the
/// operation's requests have completed: if the session ends before, the latch passes on, with or without the change.
///
/// # Errors
/// The client failed, or saw what must not be.
pub(crate) async fn perform<F: Fabric + Clock + 'static>(
    world: &World,
    client: &mut Latched<F>,
    holders: &Holders,
    (object, ask): (u64, Ask),
    how: How,
) -> Result<Value, Wrong<LatchError>> {
    let is_overtaken = Rc::default();
    let performed = perform_alone(world, client, (holders, &is_overtaken), (object, ask), how).await?;
    if holders.has_leases {
        client.settle().await?;
    }
    if is_overtaken.get() {
        return Err(Wrong::Violation(format!(
            "an operation on object {object} has succeeded, although another one got its latch meanwhile"
        )));
    }
    Ok(performed)
}

async fn perform_alone<F: Fabric + Clock + 'static>(
    world: &World,
    client: &mut Latched<F>,
    (holders, is_overtaken): (&Holders, &Rc<Cell<bool>>),
    (object, ask): (u64, Ask),
    how: How,
) -> Result<Value, Wrong<LatchError>> {
    let torn = |what: &str| Wrong::Violation(format!("{what} of object {object} returned torn bytes"));
    match ask {
        Ask::Add(tag) => {
            let body = async |content: &mut [u8]| {
                let _holder = holders.enter(object, true, is_overtaken).map_err(Wrong::Violation)?;
                let before = decode(content).ok_or_else(|| torn("a read under the exclusive latch"))?;
                encode(Value { count: before.count + 1, tag }, content);
                world.sleep(how.dwell_ns).await;
                Ok(before)
            };
            client.with_exclusive(object, body).await?
        }
        Ask::Read if how.is_shared => {
            let body = async |content: &[u8]| {
                let _holder = holders.enter(object, false, is_overtaken).map_err(Wrong::Violation)?;
                world.sleep(how.dwell_ns).await;
                decode(content).ok_or_else(|| torn("a read under the shared latch"))
            };
            client.with_shared(object, body).await?
        }
        Ask::Read => {
            let mut content = vec![0; client.spec().len as usize];
            client.read(object, &mut content).await?;
            decode(&content).ok_or_else(|| torn("a read"))
        }
    }
}

/// Draws the parameters of a store that clients with this scheme can use.
pub(crate) fn drawn_spec(random: &Random, scheme: Option<Scheme>, objects: u64, lengths: &[u32]) -> Spec {
    let any = Scheme::ALL[random.below(Scheme::ALL.len() as u64) as usize].1;
    let scheme = scheme.unwrap_or(any);
    let has_latches_apart = !scheme.is_optimistic() && !scheme.is_footer();
    let placements = if has_latches_apart { &Placement::ALL[..] } else { &Placement::ALL[..2] };
    Spec {
        objects,
        len: lengths[random.below(lengths.len() as u64) as usize],
        scheme,
        placement: placements[random.below(placements.len() as u64) as usize],
        relaxed: random.one_in(4),
        lease: None,
    }
}

/// Draws leases of the clients of a store with this scheme, each of which has `lanes` lanes.
pub(crate) fn drawn_lease(random: &Random, drawn: &Drawn, scheme: Scheme, lanes: u16) -> Option<LeaseSpec> {
    let clients = u64::from(drawn.clients);
    (!scheme.has_shared_mode() && random.one_in(2)).then(|| LeaseSpec {
        us: random.between(5_000, 20_000),
        // If there are as many ids as clients, a client that restarts takes over the id of a dead one.
        ids: random.between(clients, 2 * clients) as u16,
        lanes,
    })
}

/// Draws the pauses between attempts. `round_trip` is the usual time of a round trip in nanoseconds.
pub(crate) fn drawn_backoff(random: &Random, round_trip: Nanos) -> Backoff {
    let first = Duration::from_nanos(round_trip);
    if random.one_in(2) { Backoff { first, longest: 16 * first } } else { Backoff::NONE }
}

/// The options that a seed has drawn for a store, for reports.
pub(crate) fn options_of(spec: &Spec, backoff: Backoff) -> Vec<Choice> {
    let Spec { objects, len, scheme, placement, relaxed, lease } = *spec;
    let has_backoff = backoff != Backoff::NONE;
    let mut options = vec![
        Choice::new("scheme", scheme.name(), format!("scheme {scheme}")),
        Choice::new("objects", objects, format!("objects {objects}")),
        Choice::new("object_bytes", len, format!("object size {len}")),
        Choice::new("latches", placement.name(), format!("latches {}", placement.name())),
        Choice::new(
            "relaxed",
            relaxed,
            format!("lines land {}", if relaxed { "in any order" } else { "in order" }),
        ),
        Choice::new("backoff", has_backoff, format!("backoff {}", if has_backoff { "yes" } else { "no" })),
    ];
    if let Some(LeaseSpec { us, ids, .. }) = lease {
        options.push(Choice::new("ids", ids, format!("ids {ids}")));
        options.push(Choice::new("lease_us", us, format!("lease {us} us")));
    }
    options
}

/// A task's handle of a client of a store.
pub(crate) struct Client {
    opened: Opened,
    latched: Latched<Tracked>,
}

/// The system's clients over one session: one for each store, by the store's name.
#[derive(Default)]
pub(crate) struct Shared {
    /// Lets one task at a time open a store.
    gate: Turnstile,
    clients: RefCell<BTreeMap<String, Latched<Tracked>>>,
    /// Number of clients whose tasks have not ended.
    kept: Rc<Cell<u32>>,
}

impl Shared {
    /// Waits until the requests of all operations have completed.
    pub(crate) async fn leave(&self, scene: &Scene) {
        self.clients.take();
        while self.kept.get() > 0 {
            scene.world.sleep(AGAIN).await;
        }
    }
}

impl Family for Latch {
    type Ask = Ask;
    type Client = Client;
    type Shared = Shared;
    type Checker = Counters;

    fn drawn(_system: System, drawn: &Drawn, random: &Random) -> Latch {
        let spec = drawn_spec(random, drawn.scheme, drawn.keys.min(8), &[16, 48, 104, 200, 1000]);
        // Two for each task's handle, and for handles that were dropped and are not done yet.
        let lease = drawn_lease(random, drawn, spec.scheme, 4 * drawn.tasks as u16 + 4);
        let spec = Spec { lease, ..spec };
        Latch { spec, backoff: drawn_backoff(random, 8 * MICROS), stores: Stores::default() }
    }

    fn is_owned(&self) -> bool {
        true
    }

    fn relaxed(&self) -> Option<bool> {
        Some(self.spec.relaxed)
    }

    fn options(&self) -> Vec<Choice> {
        options_of(&self.spec, self.backoff)
    }

    fn parameters(&self) -> String {
        serde_json::to_string(&self.spec).expect("plain data")
    }

    /// In a store with leases, an operation does not end with its session: others may redo it.
    fn is_one_sided(&self) -> bool {
        self.spec.lease.is_none()
    }

    fn long_pause_one_in(&self, random: &Random) -> u64 {
        if self.spec.lease.is_some() { random.between(2, 4) } else { 0 }
    }

    fn phases(_system: System) -> &'static Phases {
        &PHASES
    }

    fn checker(&self) -> Counters {
        Counters
    }

    async fn open(&self, seat: Seat<'_, Latch>, node: NodeId, name: &str) -> Result<Client, Failure> {
        let options = (self.backoff, self.spec.lease.is_some());
        let (opened, latched) = self.stores.open(&seat, node, name, options).await?;
        Ok(Client { opened, latched })
    }

    /// Waits until the requests of all operations have completed.
    async fn leave(&self, scene: &Scene, shared: &Shared) {
        shared.leave(scene).await;
    }

    fn draw(&self, scene: &Scene, _client: &mut Client) -> (u64, Ask) {
        let random = scene.world.random();
        let object = random.below(self.spec.objects);
        (object, if random.one_in(2) { Ask::Read } else { Ask::Add(scene.next_tag()) })
    }

    async fn perform(
        &self,
        scene: &Scene,
        client: &mut Client,
        _who: u32,
        key: u64,
        ask: &Ask,
    ) -> Result<Outcome, Failure> {
        let Client { opened, latched } = client;
        let how = How::drawn(scene.world.random());
        let performed = perform(&scene.world, latched, &opened.known.holders, (key, *ask), how).await;
        let is_of_fabric = |error: &LatchError| matches!(error, LatchError::Fabric(_));
        opened.end(performed.map(Outcome::Found), is_of_fabric, Outcome::Failed)
    }

    /// In a store with leases, at times recovers the dead clients that are in nobody's way.
    async fn trespass(&self, scene: &Scene, client: &mut Client) -> Result<(), Failure> {
        if self.spec.lease.is_some() && scene.world.random().one_in(HEAL_ONE_IN) {
            client.latched.heal().await?;
        }
        Ok(())
    }

    async fn heal(&self, _scene: &Scene, client: &mut Client) -> Result<(), Failure> {
        Ok(client.latched.heal().await?)
    }

    /// Adds to each object: no latch may be held. If a client may have left a latch behind, there is nothing to read.
    fn read_all(&self, scene: &Scene) -> Vec<(u64, Ask)> {
        if self.stores.are_orphaned(scene) {
            return Vec::new();
        }
        (0..self.spec.objects)
            .flat_map(|object| [(object, Ask::Add(scene.next_tag())), (object, Ask::Read)])
            .collect()
    }

    /// Checks that nobody holds a latch, unless a client has left one behind. All clients have left.
    async fn audit(&self, scene: &Scene, node: &Node, store: &str) -> Result<(), String> {
        self.stores.audit(scene, node, store).await
    }
}

impl From<LatchError> for Failure {
    fn from(error: LatchError) -> Failure {
        let message = error.to_string();
        let kind = match &error {
            LatchError::Busy | LatchError::Fabric(FabricError::Deadline { .. }) => FailureKind::Declined,
            LatchError::Refused(status)
            | LatchError::Lease(LeaseError::Refused(status))
            | LatchError::Redo(RedoError::Refused(status)) => {
                let message = format!("a client was denied an access that it is allowed: {status}");
                return Failure { ran: error.ran(), kind: FailureKind::Refused, message };
            }
            LatchError::NoSuchObject { .. } | LatchError::Length(_) | LatchError::Damaged(_) => {
                FailureKind::Wrong
            }
            LatchError::Redo(RedoError::Damaged | RedoError::NoTokens) => FailureKind::Wrong,
            LatchError::NoLane => FailureKind::Declined,
            LatchError::Lost | LatchError::Lease(_) | LatchError::Redo(_) | LatchError::Fabric(_) => {
                FailureKind::Over
            }
        };
        Failure { ran: error.ran(), kind, message }
    }
}
