//! The family of latched objects. Each object of a store is a counter, which clients change under its latch.
//!
//! The checks share no code with the schemes:
//! - the content of an object follows from its value, so torn bytes are detected;
//! - each client that is inside an operation that holds a latch is noted, so two writers at once are detected;
//! - the checker of counters finds lost updates and stale reads;
//! - after the faults have ended, no latch may be held.
//!
//! An operation runs as a task of its own, so it goes on when its caller drops its future. A latch has no owner: if a
//! client dies or loses its session with a latch, nobody can use the object any more. The trial then creates the store
//! anew, as an operator would.
//!
//! An operation whose WRITE is not awaited returns, in the history, when its caller goes on. This is more than a scheme
//! promises. It holds as long as no session ends, because the latch is held until the WRITE has landed.

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
use farside_sim::world::{MICROS, Nanos, ProcessId, World};
use farside_systems::latch::system::LatchKind;
use farside_systems::latch::{self, LatchError, Latched, Placement, Scheme, Spec};
use farside_systems::store;
use farside_systems::system::{Backoff, Options, System as _};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// Latched objects, with the options that a seed has drawn for them.
pub(crate) struct Latch {
    spec: Spec,
    backoff: Backoff,
    /// The stores that clients have opened, by node and name.
    stores: RefCell<BTreeMap<(NodeId, String), Rc<Known>>>,
}

/// A store that clients have opened.
#[derive(Default)]
struct Known {
    holders: Holders,
    /// Number of clients that had died before a client opened the store.
    deaths_before: u64,
    /// Whether a client has lost its session while it may have held a latch.
    has_lost_session: Cell<bool>,
    is_replaced: Cell<bool>,
}

impl Known {
    /// Whether a client may have left a latch behind.
    fn has_orphans(&self, scene: &Scene) -> bool {
        self.has_lost_session.get() || scene.struck.of(Fault::ClientDeath) > self.deaths_before
    }

    /// If a client may have left a latch behind, creates the store anew after a while.
    fn replace_orphaned(self: &Rc<Self>, scene: &Rc<Scene>, site: usize, name: &str) {
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

/// Usual time, in nanoseconds, for which an operation that holds a latch waits before it ends.
const HOLDS: Nanos = 2 * MICROS;
/// Usual time, in nanoseconds, after which a store is created anew in which a latch may be held for ever.
const REPLACED_AFTER: Nanos = 100 * MICROS;
/// Pause, in nanoseconds, after which a task looks again whether another one has ended.
const AGAIN: Nanos = MICROS;

/// Indices of the phases. The idle phase is the first.
const READ: usize = 1;
const LATCH: usize = 2;
const WRITE: usize = 3;
const RELEASE: usize = 4;
const CATALOG: usize = 5;

/// The phases are in the order of the constants.
static PHASES: Phases = Phases {
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
        [(Code::Cas, _), ..] | [(Code::FetchAdd, _), _, ..] => LATCH,
        [(Code::FetchAdd, _)] => {
            let adds = chain.ops().next().map_or(0, |op| op.operands().last().copied().unwrap_or(0));
            if adds < 0x80 { LATCH } else { RELEASE }
        }
        _ => READ,
    }
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
#[derive(Default)]
pub(crate) struct Holders(RefCell<BTreeMap<u64, Held>>);

#[derive(Default)]
struct Held {
    writers: u32,
    readers: u32,
}

/// An operation that holds a latch.
pub(crate) struct Holder<'a> {
    holders: &'a Holders,
    object: u64,
    is_writer: bool,
}

impl Holders {
    /// Notes that an operation holds the latch of an object, until the returned value is dropped.
    ///
    /// # Errors
    /// Returns the violation if another operation excludes this one.
    pub(crate) fn enter(&self, object: u64, is_writer: bool) -> Result<Holder<'_>, String> {
        let mut all = self.0.borrow_mut();
        let held = all.entry(object).or_default();
        if held.writers > 0 || is_writer && held.readers > 0 {
            let new = if is_writer { "a writer" } else { "a reader" };
            return Err(format!(
                "{new} holds the latch of object {object}, beside {} writers and {} readers",
                held.writers, held.readers
            ));
        }
        *(if is_writer { &mut held.writers } else { &mut held.readers }) += 1;
        Ok(Holder { holders: self, object, is_writer })
    }
}

impl Drop for Holder<'_> {
    fn drop(&mut self) {
        if let Some(held) = self.holders.0.borrow_mut().get_mut(&self.object) {
            *(if self.is_writer { &mut held.writers } else { &mut held.readers }) -= 1;
        }
    }
}

/// Reason why an operation has no outcome.
pub(crate) enum Wrong {
    /// The client reported an error.
    Error(LatchError),
    /// The client violated a property of the objects.
    Violation(String),
}

impl From<LatchError> for Wrong {
    fn from(error: LatchError) -> Wrong {
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

/// Carries out an operation on an object, and checks what the client sees.
///
/// # Errors
/// The client failed, or saw what must not be.
pub(crate) async fn perform<F: Fabric + Clock + 'static>(
    world: &World,
    client: &mut Latched<F>,
    holders: &Holders,
    (object, ask): (u64, Ask),
    how: How,
) -> Result<Value, Wrong> {
    let torn = |what: &str| Wrong::Violation(format!("{what} of object {object} returned torn bytes"));
    match ask {
        Ask::Add(tag) => {
            let body = async |content: &mut [u8]| {
                let _holder = holders.enter(object, true).map_err(Wrong::Violation)?;
                let before = decode(content).ok_or_else(|| torn("a read under the exclusive latch"))?;
                encode(Value { count: before.count + 1, tag }, content);
                world.sleep(how.dwell_ns).await;
                Ok(before)
            };
            client.with_exclusive(object, body).await?
        }
        Ask::Read if how.is_shared => {
            let body = async |content: &[u8]| {
                let _holder = holders.enter(object, false).map_err(Wrong::Violation)?;
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
    }
}

/// Draws the pauses between attempts. `round_trip` is the usual time of a round trip in nanoseconds.
pub(crate) fn drawn_backoff(random: &Random, round_trip: Nanos) -> Backoff {
    let first = Duration::from_nanos(round_trip);
    if random.one_in(2) { Backoff { first, longest: 16 * first } } else { Backoff::NONE }
}

/// A task's client of a store.
pub(crate) struct Client {
    scene: Rc<Scene>,
    process: ProcessId,
    /// Index of the site, and name of the store.
    site: usize,
    store: String,
    known: Rc<Known>,
    lent: Rc<Lent>,
}

/// The client of a task, which the operations' own tasks use in turn.
pub(crate) struct Lent {
    known: Rc<Known>,
    client: RefCell<Option<Latched<Tracked>>>,
    outcome: Cell<Option<Result<Outcome, Failure>>>,
}

impl Lent {
    /// Waits until the last operation has ended, and takes the client.
    async fn take(&self, world: &World) -> Latched<Tracked> {
        loop {
            if let Some(client) = self.client.take() {
                return client;
            }
            world.sleep(AGAIN).await;
        }
    }
}

/// The clients of a session's tasks.
#[derive(Default)]
pub(crate) struct Shared(RefCell<Vec<Rc<Lent>>>);

impl Family for Latch {
    type Ask = Ask;
    type Client = Client;
    type Shared = Shared;
    type Checker = Counters;

    fn drawn(_system: System, drawn: &Drawn, random: &Random) -> Latch {
        let spec = drawn_spec(random, drawn.scheme, drawn.keys.min(8), &[16, 48, 104, 200, 1000]);
        Latch { spec, backoff: drawn_backoff(random, 8 * MICROS), stores: RefCell::default() }
    }

    fn is_owned(&self) -> bool {
        true
    }

    fn relaxed(&self) -> Option<bool> {
        Some(self.spec.relaxed)
    }

    fn options(&self) -> Vec<Choice> {
        let Spec { objects, len, scheme, placement, relaxed } = self.spec;
        let has_backoff = self.backoff != Backoff::NONE;
        vec![
            Choice::new("scheme", scheme.name(), format!("scheme {scheme}")),
            Choice::new("objects", objects, format!("objects {objects}")),
            Choice::new("object_bytes", len, format!("object size {len}")),
            Choice::new("latches", placement.name(), format!("latches {}", placement.name())),
            Choice::new(
                "relaxed",
                relaxed,
                format!("lines land {}", if relaxed { "in any order" } else { "in order" }),
            ),
            Choice::new(
                "backoff",
                has_backoff,
                format!("backoff {}", if has_backoff { "yes" } else { "no" }),
            ),
        ]
    }

    fn parameters(&self) -> String {
        serde_json::to_string(&self.spec).expect("plain data")
    }

    fn is_one_sided(&self) -> bool {
        true
    }

    fn phases(_system: System) -> &'static Phases {
        &PHASES
    }

    fn checker(&self) -> Counters {
        Counters
    }

    async fn open(&self, seat: Seat<'_, Latch>, node: NodeId, name: &str) -> Result<Client, Failure> {
        let fabric = seat.fabric();
        let found = store::fetch_of(&fabric, node, name, latch::KIND).await?;
        let entropy = seat.scene.world.random().bits();
        let options = Options { entropy, backoff: Some(self.backoff), ..Options::NONE };
        let client = LatchKind::open(fabric, &store::Members::one(node, found), &options).await?;
        let deaths_before = seat.scene.struck.of(Fault::ClientDeath);
        let new = || Rc::new(Known { deaths_before, ..Known::default() });
        let known = Rc::clone(self.stores.borrow_mut().entry((node, name.to_owned())).or_insert_with(new));
        known.replace_orphaned(seat.scene, seat.site.index, name);
        let client = RefCell::new(Some(client));
        let lent = Rc::new(Lent { known: Rc::clone(&known), client, outcome: Cell::default() });
        seat.shared.0.borrow_mut().push(Rc::clone(&lent));
        let scene = Rc::clone(seat.scene);
        Ok(Client {
            scene,
            process: seat.process,
            site: seat.site.index,
            store: name.to_owned(),
            known,
            lent,
        })
    }

    /// Waits until the requests of all operations have completed.
    async fn leave(&self, scene: &Scene, Shared(lent): &Shared) {
        for lent in lent.take() {
            let mut client = lent.take(&scene.world).await;
            if client.settle().await.is_err() {
                lent.known.has_lost_session.set(true);
            }
        }
    }

    fn draw(&self, scene: &Scene, _client: &mut Client) -> (u64, Ask) {
        let random = scene.world.random();
        let object = random.below(self.spec.objects);
        (object, if random.one_in(2) { Ask::Read } else { Ask::Add(scene.next_tag()) })
    }

    async fn perform(
        &self,
        _scene: &Scene,
        client: &mut Client,
        _who: u32,
        key: u64,
        ask: &Ask,
    ) -> Result<Outcome, Failure> {
        let Client { scene, process, site, store, known, lent } = client;
        let mut latched = lent.take(&scene.world).await;
        lent.outcome.take(); // That of an operation whose caller has gone.
        let (world, ask, theirs) = (scene.world.clone(), *ask, Rc::clone(lent));
        scene.world.spawn(*process, async move {
            let how = How::drawn(world.random());
            let outcome = perform(&world, &mut latched, &theirs.known.holders, (key, ask), how).await;
            theirs.client.replace(Some(latched));
            if let Err(Wrong::Error(LatchError::Fabric(_))) = &outcome {
                theirs.known.has_lost_session.set(true);
            }
            theirs.outcome.set(Some(match outcome {
                Ok(found) => Ok(Outcome::Found(found)),
                Err(Wrong::Error(error)) => Err(error.into()),
                Err(Wrong::Violation(message)) => {
                    Err(Failure { ran: Ran::Unknown, kind: FailureKind::Wrong, message })
                }
            }));
        });
        let outcome = loop {
            if let Some(outcome) = lent.outcome.take() {
                break outcome;
            }
            scene.world.sleep(AGAIN).await;
        };
        known.replace_orphaned(scene, *site, store);
        match outcome {
            Err(Failure { kind: FailureKind::Declined, ran: Ran::No, .. }) => Ok(Outcome::Failed),
            outcome => outcome,
        }
    }

    /// Adds to each object: no latch may be held. If a client may have left a latch behind, there is nothing to read.
    fn read_all(&self, scene: &Scene) -> Vec<(u64, Ask)> {
        let is_lost = |site: &Rc<Site>| {
            let stores = self.stores.borrow();
            stores.get(&(site.node.id(), site.store_name())).is_some_and(|known| known.has_orphans(scene))
        };
        if scene.sites.iter().any(is_lost) {
            return Vec::new();
        }
        (0..self.spec.objects)
            .flat_map(|object| [(object, Ask::Add(scene.next_tag())), (object, Ask::Read)])
            .collect()
    }

    /// Checks that nobody holds a latch, unless a client has left one behind. All clients have left.
    async fn audit(&self, scene: &Scene, node: &Node, store: &str) -> Result<(), String> {
        let found = node.answer(control::Ask::OpenStore { name: store.to_owned() }).await?;
        let control::Answer::Store(store) = found else { return Err(format!("{found:?}")) };
        let memory = node.memory();
        let held = latch::held(&store, |at| memory.load(at, Width::W8) as u64)?;
        let stores = self.stores.borrow();
        let is_lost = |known: &Rc<Known>| known.has_orphans(scene);
        if held.is_empty() || stores.get(&(node.id(), store.name)).is_some_and(is_lost) {
            return Ok(());
        }
        Err(format!("after all clients have left, latches are held (object, word): {held:x?}"))
    }
}

impl From<LatchError> for Failure {
    fn from(error: LatchError) -> Failure {
        let message = error.to_string();
        let kind = match &error {
            LatchError::Busy | LatchError::Fabric(FabricError::Deadline { .. }) => FailureKind::Declined,
            LatchError::Refused(status) => {
                let message = format!("a client was denied an access that it is allowed: {status}");
                return Failure { ran: error.ran(), kind: FailureKind::Refused, message };
            }
            LatchError::NoSuchObject { .. } | LatchError::Length(_) => FailureKind::Wrong,
            LatchError::Fabric(_) => FailureKind::Over,
        };
        Failure { ran: error.ran(), kind, message }
    }
}
