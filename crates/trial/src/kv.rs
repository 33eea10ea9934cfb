//! The family of key-value stores. Each key of a store is a register.

use crate::family::{Failure, FailureKind, Family, Seat};
use crate::flight::{Phase, Phases, Request, Tracked};
use crate::systems::System;
use crate::{Choice, Drawn, Scene, values};
use farside_remote::control::{self, Answer};
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::{Capabilities, NodeId};
use farside_sim::history::register::{Ask, Outcome, Value, Version};
use farside_sim::linearizable::{Limits, Registers};
use farside_sim::node::Node;
use farside_sim::random::Random;
use farside_systems::kv::prism_kv::layout::TableSpec;
use farside_systems::kv::{Kv as _, Version as Installed};
use farside_systems::registry::{self, OneKv, Registered};
use farside_systems::system::{Options, Sizing};

/// A key-value system, with the options that a seed has drawn for the system.
pub(crate) struct Kv {
    system: &'static Registered,
    sizes: Sizes,
    /// Whether keys are numbers, each with a slot of its own. Otherwise keys are strings, which are hashed.
    is_permuted: bool,
}

/// Sizes of a store and of its values.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    /// Number of items for which the store is created.
    items: u64,
    /// Maximum length of a value in bytes, except for large values.
    value_max: u64,
    /// One in this many values is large; none is if 0.
    large_one_in: u64,
    /// Number of slots that each client caches.
    slot_cache: usize,
}

impl Sizes {
    /// Draws the sizes. `of_large` lists the phases that occur only for large values. It is `None` if the system has
    /// no large values.
    pub(crate) fn drawn(drawn: &Drawn, of_large: Option<&[usize]>, random: &Random) -> Sizes {
        let has_focus = drawn.focus.is_some_and(|focus| of_large.is_some_and(|large| large.contains(&focus)));
        let large_one_in = match (has_focus, of_large) {
            (true, _) => 3,
            (_, Some(_)) if random.one_in(8) => 40,
            _ => 0,
        };
        Sizes {
            items: if drawn.is_crowded { 4 } else { random.between(drawn.keys, 4 * drawn.keys).max(4) },
            value_max: [16, 200, 1500][random.below(3) as usize],
            large_one_in,
            slot_cache: [0, 1, 2, 16][random.below(4) as usize],
        }
    }

    /// Draws the size of a new value, and returns the value.
    pub(crate) fn value(&self, scene: &Scene) -> Value {
        let (tag, random) = (scene.next_tag(), scene.world.random());
        let len = if random.one_in(self.large_one_in) {
            random.between(61_000, 140_000)
        } else {
            random.between(8, self.value_max)
        };
        Value { tag, len: len as u32 }
    }

    pub(crate) fn options(&self) -> Vec<Choice> {
        let Sizes { items, value_max, large_one_in, slot_cache } = *self;
        let large = if large_one_in == 0 { "none".to_owned() } else { format!("1 in {large_one_in}") };
        vec![
            Choice::new("items", items, format!("items {items}")),
            Choice::new("value_bytes_max", value_max, format!("value size up to {value_max}")),
            Choice::new("large_one_in", large_one_in, format!("large values {large}")),
            Choice::new("slot_cache", slot_cache, format!("slot cache {slot_cache}")),
        ]
    }
}

/// Client of the system under trial. `seen` is the key and the version that the client has seen last.
pub(crate) struct Client {
    kv: OneKv<Tracked>,
    seen: Option<(u64, Installed)>,
}

/// Indices of the phases of PRISM-KV that occur for large values only.
const PART: usize = 2;
const SWING: usize = 4;

static PHASES: Phases = Phases {
    all: &[
        Phase::new("idle").rare(),
        Phase::new("look"),
        Phase::allocating("part"),
        Phase::allocating("install"),
        Phase::allocating("swing").rare(),
        Phase::new("catalog").rare(),
    ],
    of: |request, seen| match request {
        Request::Call(..) => 5,
        Request::Chain(chain) => match (chain.allocates(), chain.atomics()) {
            (0, 0) => 1,
            (_, 0) => PART,
            // This chain installs the head of a value whose parts earlier chains have written.
            _ if seen >> PART & 1 == 1 => SWING,
            _ => 3,
        },
    },
};

static PHASES_OF_CALLS: Phases = Phases {
    all: &[
        Phase::new("idle").rare(),
        Phase::new("look"),
        Phase::allocating("call"),
        Phase::new("catalog").rare(),
    ],
    of: |request, _| match request {
        Request::Chain(_) => 1,
        Request::Call(ServiceId::NODE, _) => 3,
        Request::Call(..) => 2,
    },
};

/// Whether the system's clients call its service. Such a system has no conditional puts, no values of several parts,
/// and no rebuilds.
fn is_called(system: &Registered) -> bool {
    system.needs.contains(Capabilities::CALLS)
}

fn registered(system: System) -> &'static Registered {
    registry::named(system.name()).expect("every key-value system is registered")
}

impl Kv {
    fn is_called(&self) -> bool {
        is_called(self.system)
    }

    fn key(&self, number: u64) -> Vec<u8> {
        if self.is_permuted { number.to_le_bytes().to_vec() } else { values::key(number) }
    }
}

impl Family for Kv {
    type Ask = Ask;
    type Client = Client;
    type Shared = ();
    type Checker = Registers;

    fn drawn(system: System, drawn: &Drawn, random: &Random) -> Kv {
        let system = registered(system);
        let of_large = (!is_called(system)).then_some(&[PART, SWING][..]);
        let sizes = Sizes::drawn(drawn, of_large, random);
        Kv { system, sizes, is_permuted: random.one_in(3) }
    }

    fn rebuild_one_in(&self, random: &Random) -> u64 {
        if self.is_called() { 0 } else { [0, 0, 5, 40][random.below(4) as usize] }
    }

    fn options(&self) -> Vec<Choice> {
        let mut options = self.sizes.options();
        let keys = if self.is_permuted { "collision-free" } else { "hashed" };
        options.push(Choice::new("is_permuted", self.is_permuted, format!("keys {keys}")));
        options
    }

    fn parameters(&self) -> String {
        let items = Some(self.sizes.items);
        (self.system.parameters)(&Sizing { items, collision_free: self.is_permuted, ..Sizing::default() })
    }

    fn rebuilt(&self, random: &Random) -> String {
        format!("{{\"items\": {}}}", random.between(4, 4 * self.sizes.items))
    }

    fn is_one_sided(&self) -> bool {
        !self.is_called()
    }

    fn phases(system: System) -> &'static Phases {
        if is_called(registered(system)) { &PHASES_OF_CALLS } else { &PHASES }
    }

    fn checker(&self) -> Registers {
        Registers(Limits::default())
    }

    async fn open(&self, seat: Seat<'_, Kv>, node: NodeId, name: &str) -> Result<Client, Failure> {
        let options = Options { slot_cache: self.sizes.slot_cache, ..Options::default() };
        let kv = OneKv::open(seat.fabric(), node, name, &options).await?;
        Ok(Client { kv, seen: None })
    }

    fn draw(&self, scene: &Scene, client: &mut Client) -> (u64, Ask) {
        let random = scene.world.random();
        let key = random.below(scene.drawn.keys);
        let value = || self.sizes.value(scene);
        let ask = match random.below(16) {
            0..6 => Ask::Get,
            6..10 => Ask::Put(value()),
            10..13 => Ask::Delete,
            13 if self.is_called() => Ask::Put(value()),
            13 => Ask::PutIfAbsent(value()),
            _ => match client.seen.take().filter(|(seen, _)| *seen == key) {
                Some((_, version)) => Ask::CompareAndPut { expected: reported(version), value: value() },
                None => Ask::Get,
            },
        };
        (key, ask)
    }

    async fn perform(
        &self,
        scene: &Scene,
        client: &mut Client,
        _who: u32,
        number: u64,
        ask: &Ask,
    ) -> Result<Outcome, Failure> {
        let key = self.key(number);
        let Client { kv, seen } = client;
        Ok(match *ask {
            Ask::Get => {
                let Some(item) = kv.get(&key).await? else { return Ok(Outcome::Absent) };
                let value = values::known(item.value).ok_or_else(|| unknown_bytes(number))?;
                // Only conditional puts use the version, and systems with calls have none.
                *seen = (!self.is_called()).then_some((number, item.version));
                Outcome::Found(value, Some(reported(item.version)))
            }
            Ask::Put(value) => {
                kv.put(&key, &values::bytes(value)).await?;
                Outcome::Done(None)
            }
            Ask::Delete => {
                if kv.delete(&key).await? {
                    Outcome::Done(None)
                } else {
                    Outcome::Absent
                }
            }
            Ask::PutIfAbsent(value) => match kv.put_if_absent(&key, &values::bytes(value)).await? {
                true => Outcome::Done(None),
                false => Outcome::Conflict(None),
            },
            Ask::CompareAndPut { expected, value } => {
                let (expected, bytes) = (Installed(expected.0 as u32), values::bytes(value));
                match kv.compare_and_put(&key, expected, &bytes).await? {
                    Ok(version) => Outcome::Done(Some(reported(version))),
                    Err(conflict) => {
                        scene.count(|counts| counts.conflicts += 1);
                        let version = conflict.version.map(reported);
                        version.map_or(Outcome::Absent, |version| Outcome::Conflict(Some(version)))
                    }
                }
            }
        })
    }

    fn read_all(&self, scene: &Scene) -> Vec<(u64, Ask)> {
        (0..scene.drawn.keys).map(|key| (key, Ask::Get)).collect()
    }

    async fn audit(&self, scene: &Scene, node: &Node, store: &str) -> Result<(), String> {
        if !self.is_called() {
            let left = tables_left(node, store).await?;
            scene.count(|counts| counts.rebuilds += left);
        }
        Ok(())
    }
}

/// Returns the failure of a get that has read bytes which are no value of the trial. This is a violation.
pub(crate) fn unknown_bytes(key: u64) -> Failure {
    let message = format!("a get of key {key} read bytes that no client has put");
    Failure { ran: Ran::No, kind: FailureKind::Wrong, message }
}

/// Converts a system's version to a version of the history.
fn reported(version: Installed) -> Version {
    Version(version.0.into())
}

/// Returns the number of tables that rebuilds of a PRISM-KV store have replaced. The first table has the epoch 1.
async fn tables_left(node: &Node, name: &str) -> Result<u64, String> {
    let opened = node.answer(control::Ask::OpenStore { name: name.to_owned() }).await?;
    let Answer::Store(store) = opened else { return Err(format!("{opened:?}")) };
    let spec: TableSpec = serde_json::from_str(&store.parameters).map_err(|error| {
        format!("invalid table description in the catalog: {error}: {}", store.parameters)
    })?;
    Ok(spec.epoch - 1)
}
