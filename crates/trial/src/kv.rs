//! The family of key-value stores. Each key of a store is a register.

use crate::family::{Failure, FailureKind, Family, Kept, Loss, Seat};
use crate::flight::{Phase, Phases, Request, Tracked};
use crate::systems::System;
use crate::{Choice, Drawn, Scene, values};
use farside_node::log::{LogOptions, SYNC_INTERVAL, SyncPolicy};
use farside_remote::control::{self, Answer, Store};
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::service::ADDRESS_SIZE;
use farside_remote::wire::Code;
use farside_remote::{Capabilities, ChainView, FabricError, NodeId};
use farside_sim::fault::Fault;
use farside_sim::history::register::{Ask, Operation, Outcome, Value, Version};
use farside_sim::linearizable::{Limits, Registers};
use farside_sim::node::Node;
use farside_sim::random::Random;
use farside_sim::world::{MILLIS, Nanos};
use farside_systems::kv::chequer::layout::{
    Bucket, KEY_INLINE, RECORD_SIZE, Record, Table, Used, block_len, value_in,
};
use farside_systems::kv::chequer::request;
use farside_systems::kv::prism_kv::layout::TableSpec;
use farside_systems::kv::{Kv as _, KvError, Version as Installed};
use farside_systems::kv::{cached_index, chequer, farm_kv};
use farside_systems::registry::{self, OneKv, Registered};
use farside_systems::system::{Options, Sizing};
use std::collections::BTreeMap;
use std::time::Duration;
use zerocopy::{FromZeros, IntoBytes};

/// A key-value system, with the options that a seed has drawn for the system.
pub(crate) struct Kv {
    system: &'static Registered,
    sizes: Sizes,
    /// Whether keys are numbers, each with a slot of its own. Otherwise keys are strings, which are hashed.
    is_permuted: bool,
    /// Options of Chequer and of Chequer-message.
    chequer: Option<Chequer>,
    /// Size in bytes of each client's cache of the index, in systems with such a cache.
    node_cache: Option<usize>,
}

/// Options of Chequer's kinds. Chequer-message uses those that concern the node.
struct Chequer {
    /// Size in bytes of each client's cache of values.
    value_cache: usize,
    /// Length in bytes from which a client writes a value itself.
    put_threshold: u32,
    /// Number of buckets of a block.
    block_buckets: u64,
    /// Number of partitions of the table.
    partitions: u64,
    /// Whether keys are so long that they lie in front of their values.
    has_long_keys: bool,
    /// Options of the store's log, if it has one.
    log: Option<LogOptions>,
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
    /// Maximum length of a large value in bytes.
    large_max: u64,
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
            large_max: 140_000,
            slot_cache: [0, 1, 2, 16][random.below(4) as usize],
        }
    }

    /// Draws the size of a new value, and returns the value.
    pub(crate) fn value(&self, scene: &Scene) -> Value {
        let (tag, random) = (scene.next_tag(), scene.world.random());
        let len = if random.one_in(self.large_one_in) {
            random.between(61_000, self.large_max)
        } else {
            random.between(8, self.value_max)
        };
        Value { tag, len: len as u32 }
    }

    pub(crate) fn options(&self) -> Vec<Choice> {
        let Sizes { items, value_max, large_one_in, slot_cache, .. } = *self;
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
    of: phase_of_calls,
};

/// Phases of systems whose tables have places of one size. Their stores have no buffers, and their clients do not
/// sleep. A put that finds no place is declined, as in a trial with more keys than places.
static PHASES_OF_PLACES: Phases = Phases {
    all: &[
        Phase::new("idle").rare().sleepless(),
        Phase::new("look").sleepless(),
        Phase::new("call").sleepless(),
        Phase::new("catalog").rare().sleepless(),
    ],
    of: phase_of_calls,
};

fn phase_of_calls(request: Request<'_>, _passed: u32) -> usize {
    match request {
        Request::Chain(_) => 1,
        Request::Call(ServiceId::NODE, _) => 3,
        Request::Call(..) => 2,
    }
}

/// Whether the system's clients call its service. Such a system has no conditional puts, no values of several parts,
/// and no rebuilds.
fn is_called(system: &Registered) -> bool {
    system.needs.contains(Capabilities::CALLS)
}

/// Whether the system's table has places of one size for keys and their values.
fn has_places(system: &Registered) -> bool {
    [farm_kv::KIND, cached_index::KIND].contains(&system.kind)
}

/// Indices of the phases of Chequer and of Chequer-message.
mod phase {
    pub(super) const BLOCK: usize = 1;
    pub(super) const VALUE: usize = 2;
    pub(super) const CALL: usize = 3;
    pub(super) const RESERVE: usize = 4;
    pub(super) const WRITE: usize = 5;
    pub(super) const COMMIT: usize = 6;
    pub(super) const WITHDRAW: usize = 7;
    pub(super) const CATALOG: usize = 8;

    pub(super) const MESSAGE_CALL: usize = 1;
    pub(super) const MESSAGE_RESERVE: usize = 2;
    pub(super) const MESSAGE_PART: usize = 3;
    pub(super) const MESSAGE_COMMIT: usize = 4;
    pub(super) const MESSAGE_CATALOG: usize = 5;
}

static PHASES_OF_CHEQUER: Phases = Phases {
    all: &[
        Phase::new("idle").rare(),
        Phase::new("block"),
        Phase::new("value"),
        Phase::allocating("call").logging(),
        Phase::allocating("reserve"),
        Phase::new("write"),
        Phase::new("commit").logging(),
        Phase::new("withdraw").rare(),
        Phase::new("catalog").rare(),
    ],
    of: |request, _| match request {
        Request::Chain(chain) => of_chain(&chain),
        Request::Call(ServiceId::NODE, _) => phase::CATALOG,
        Request::Call(_, bytes) => match operation(bytes) {
            Some(request::Request::Reserve { .. }) => phase::RESERVE,
            Some(request::Request::Commit { .. }) => phase::COMMIT,
            Some(request::Request::Withdraw { .. }) => phase::WITHDRAW,
            _ => phase::CALL,
        },
    },
};

static PHASES_OF_MESSAGE: Phases = Phases {
    all: &[
        Phase::new("idle").rare(),
        Phase::allocating("call").logging(),
        Phase::allocating("reserve").rare(),
        Phase::new("part"),
        Phase::new("commit").logging().rare(),
        Phase::new("catalog").rare(),
    ],
    of: |request, _| match request {
        Request::Call(ServiceId::NODE, _) => phase::MESSAGE_CATALOG,
        Request::Call(_, bytes) => match operation(bytes) {
            Some(request::Request::Reserve { .. }) => phase::MESSAGE_RESERVE,
            Some(request::Request::Write { .. }) => phase::MESSAGE_PART,
            Some(request::Request::Get { offset: 1.., .. }) => phase::MESSAGE_PART,
            Some(request::Request::Commit { .. } | request::Request::Withdraw { .. }) => {
                phase::MESSAGE_COMMIT
            }
            _ => phase::MESSAGE_CALL,
        },
        Request::Chain(_) => unreachable!("clients of Chequer-message make calls alone"),
    },
};

/// Phase of a chain of Chequer. A block of buckets has a length that no value's block has ([`Kv::value`]).
fn of_chain(chain: &ChainView<'_>) -> usize {
    let of_buckets = BLOCK_BUCKETS.map(|buckets| (buckets * RECORD_SIZE) as u32);
    match chain.ops().next() {
        Some(op) if op.code() == Code::Read && of_buckets.contains(&op.header().len.get()) => phase::BLOCK,
        Some(op) if op.code() == Code::Read => phase::VALUE,
        _ => phase::WRITE,
    }
}

/// Decodes a request to the service, which follows the store's secret.
fn operation(bytes: &[u8]) -> Option<request::Request<'_>> {
    request::Request::decode(bytes.get(ADDRESS_SIZE..)?).ok()
}

/// Numbers of buckets of a block that a seed may draw.
const BLOCK_BUCKETS: [u64; 3] = [1, 4, 8];

impl Chequer {
    /// Draws the options of a store, some of them so that the phase within which faults strike occurs.
    fn drawn(drawn: &Drawn, system: &Registered, random: &Random) -> Chequer {
        let is_message = system.kind == chequer::MESSAGE_KIND;
        let focus = drawn.focus.filter(|_| !is_message);
        let in_mode_2 = matches!(focus, Some(phase::RESERVE..=phase::WITHDRAW));
        let thresholds = if in_mode_2 { [0, 0, 64, 64] } else { [0, 64, 1024, u32::MAX] };
        let block_buckets = BLOCK_BUCKETS[random.below(3) as usize];
        let (sync, sync_interval) = [
            (SyncPolicy::Each, SYNC_INTERVAL),
            (SyncPolicy::Each, SYNC_INTERVAL),
            (SyncPolicy::Interval, Duration::from_nanos([MILLIS, 10 * MILLIS][random.below(2) as usize])),
            (SyncPolicy::Never, SYNC_INTERVAL),
        ][random.below(4) as usize];
        let log = LogOptions {
            sync,
            sync_interval,
            checkpoint_min: [2_000, 20_000, 64 << 20][random.below(3) as usize],
        };
        Chequer {
            value_cache: [0, 400, 1 << 20][random.below(3) as usize],
            put_threshold: thresholds[random.below(4) as usize],
            // With one bucket, a table may be too small for its few keys, so that puts are withdrawn.
            block_buckets: if focus == Some(phase::WITHDRAW) { 1 } else { block_buckets },
            partitions: [1, 1, 2, 4][random.below(4) as usize],
            has_long_keys: random.one_in(4),
            log: Some(log).filter(|_| random.one_in(2)),
        }
    }

    fn options(&self) -> Vec<Choice> {
        let Chequer { value_cache, put_threshold, block_buckets, partitions, has_long_keys, log } = *self;
        let threshold = if put_threshold == u32::MAX { "none".to_owned() } else { put_threshold.to_string() };
        let log = log.map_or("none".to_owned(), |log| {
            let sync = match log.sync {
                SyncPolicy::Each => "each".to_owned(),
                SyncPolicy::Interval => format!("interval of {} ms", log.sync_interval.as_millis()),
                SyncPolicy::Never => "never".to_owned(),
            };
            format!("synced {sync}, with checkpoints from {} bytes", log.checkpoint_min)
        });
        let keys = if has_long_keys { "long" } else { "short" };
        vec![
            Choice::new("value_cache", value_cache, format!("value cache {value_cache}")),
            Choice::new("put_threshold", put_threshold, format!("put threshold {threshold}")),
            Choice::new("block_buckets", block_buckets, format!("block buckets {block_buckets}")),
            Choice::new("partitions", partitions, format!("partitions {partitions}")),
            Choice::new("has_long_keys", has_long_keys, format!("keys {keys}")),
            Choice::new("log", log.clone(), format!("log {log}")),
        ]
    }
}

fn registered(system: System) -> &'static Registered {
    registry::named(system.name()).expect("every key-value system is registered")
}

impl Kv {
    fn is_called(&self) -> bool {
        is_called(self.system)
    }

    fn key(&self, number: u64) -> Vec<u8> {
        let mut key = if self.is_permuted { number.to_le_bytes().to_vec() } else { values::key(number) };
        if self.chequer.as_ref().is_some_and(|of| of.has_long_keys) {
            key.resize(key.len() + KEY_INLINE, b'.');
        }
        key
    }

    /// Draws a new value of a key. In Chequer, no block of a value is as long as a block of buckets.
    fn value(&self, scene: &Scene, key: u64) -> Value {
        let value = self.sizes.value(scene);
        let key_len = self.key(key).len();
        let is_of_buckets = |buckets| block_len(key_len, value.len as usize) as u64 == buckets * RECORD_SIZE;
        let longer = u32::from(self.chequer.is_some() && BLOCK_BUCKETS.into_iter().any(is_of_buckets));
        Value { len: value.len + longer, ..value }
    }

    /// Converts an error. A log that cannot be written refuses its store's puts and deletes.
    fn failure(&self, error: KvError) -> Failure {
        let ran = error.ran();
        match error {
            KvError::Fabric(FabricError::Refused(reason)) if reason.contains("the log of store") => {
                // Its sync failed, or an earlier one did.
                let is_failed = ["could not be synced", "failed, and nothing is written"];
                let kind = match is_failed.iter().any(|part| reason.contains(part)) {
                    true if reason.contains("could not be paired with the memory") => FailureKind::Unpaired,
                    true => FailureKind::SyncFailed,
                    false => FailureKind::DiskFull,
                };
                Failure { ran, kind, message: reason }
            }
            error => error.into(),
        }
    }
}

impl Family for Kv {
    type Ask = Ask;
    type Client = Client;
    type Shared = ();
    type Checker = Registers;

    fn drawn(system: System, drawn: &Drawn, random: &Random) -> Kv {
        let system = registered(system);
        let of_large: Option<&[usize]> = match system.kind {
            chequer::KIND => Some(&[]),
            chequer::MESSAGE_KIND => {
                Some(&[phase::MESSAGE_RESERVE, phase::MESSAGE_PART, phase::MESSAGE_COMMIT])
            }
            _ if is_called(system) => None,
            _ => Some(&[PART, SWING]),
        };
        let mut sizes = Sizes::drawn(drawn, of_large, random);
        let is_permuted = random.one_in(3);
        let is_logged = [chequer::KIND, chequer::MESSAGE_KIND].contains(&system.kind);
        let chequer = is_logged.then(|| Chequer::drawn(drawn, system, random));
        if is_logged && drawn.focus == Some(phase::WITHDRAW) && system.kind == chequer::KIND {
            sizes.items = 1;
        }
        if is_logged && drawn.faults.contains(&Fault::Exhaustion) && random.one_in(2) {
            // Blocks lie in the table, whose area of values has almost 1 MiB. Few large values fill it, or many others.
            (sizes.value_max, sizes.large_one_in, sizes.large_max) = (40_000, 2, 300_000);
            if drawn.is_crowded {
                (sizes.items, sizes.large_one_in) = (drawn.keys, 0);
            }
        }
        if has_places(system) {
            // With few buckets, keys collide. With many keys, a table that is almost full moves keys most often.
            sizes.items = match (random.one_in(2), drawn.is_crowded) {
                (true, _) => 4,
                (false, true) => random.between(drawn.keys / 4, drawn.keys),
                (false, false) => sizes.items,
            };
        }
        let is_cached = system.kind == cached_index::KIND;
        let node_cache = is_cached.then(|| [0, 200, 1000, 1 << 20][random.below(4) as usize]);
        Kv { system, sizes, is_permuted, chequer, node_cache }
    }

    fn quota_mib(&self, drawn: &Drawn) -> Option<u64> {
        (self.chequer.is_some() && drawn.faults.contains(&Fault::Exhaustion)).then_some(1)
    }

    fn log(&self) -> Option<LogOptions> {
        self.chequer.as_ref()?.log
    }

    fn survives(&self, fault: Fault) -> bool {
        !fault.is_of_logs() || self.log().is_some()
    }

    fn may_lose_last(&self) -> bool {
        self.log().is_some_and(|log| log.sync != SyncPolicy::Each)
    }

    fn after_loss(
        &self,
        node: &Node,
        store: &Store,
        before: &[Operation],
        loss: &Loss,
    ) -> Result<Kept<Kv>, String> {
        let keys = before.iter().map(|of| of.key);
        let numbers = keys.map(|number| (self.key(number), number)).collect();
        let values = values_in_use(node, store, &numbers)?;
        let log = self.log().filter(|log| log.sync == SyncPolicy::Interval);
        // A node's clock may be slower than the world's by a fifth.
        let interval = log.map(|log| log.sync_interval.as_nanos() as u64 * 5 / 4 + WRITTEN_WITHIN);
        let has_lost = judge_kept(&values, before, loss, interval)?;
        let kept = values.into_iter().map(|(key, value)| (key, Ask::Put(value), Outcome::Done(None)));
        Ok((kept.collect(), has_lost))
    }

    fn rebuild_one_in(&self, random: &Random) -> u64 {
        if self.is_called() { 0 } else { [0, 0, 5, 40][random.below(4) as usize] }
    }

    fn options(&self) -> Vec<Choice> {
        let mut options = self.sizes.options();
        let keys = if self.is_permuted { "collision-free" } else { "hashed" };
        options.push(Choice::new("is_permuted", self.is_permuted, format!("keys {keys}")));
        options.extend(self.chequer.iter().flat_map(Chequer::options));
        let cached =
            self.node_cache.map(|bytes| Choice::new("node_cache", bytes, format!("index cache {bytes}")));
        options.extend(cached);
        options
    }

    fn parameters(&self) -> String {
        let items = Some(self.sizes.items);
        let of = self.chequer.as_ref();
        (self.system.parameters)(&Sizing {
            items,
            key_len: if has_places(self.system) { values::KEY_LEN_MAX } else { 0 },
            value_len: if has_places(self.system) { self.sizes.value_max as usize } else { 0 },
            collision_free: self.is_permuted,
            block_buckets: of.map(|of| of.block_buckets),
            partitions: of.map(|of| of.partitions),
            put_threshold: of.map(|of| of.put_threshold),
            ..Sizing::default()
        })
    }

    fn rebuilt(&self, random: &Random) -> String {
        format!("{{\"items\": {}}}", random.between(4, 4 * self.sizes.items))
    }

    fn is_one_sided(&self) -> bool {
        !self.is_called()
    }

    fn phases(system: System) -> &'static Phases {
        let system = registered(system);
        match system.kind {
            chequer::KIND => &PHASES_OF_CHEQUER,
            chequer::MESSAGE_KIND => &PHASES_OF_MESSAGE,
            _ if has_places(system) => &PHASES_OF_PLACES,
            _ if is_called(system) => &PHASES_OF_CALLS,
            _ => &PHASES,
        }
    }

    fn checker(&self) -> Registers {
        Registers(Limits::default())
    }

    async fn open(&self, seat: Seat<'_, Kv>, node: NodeId, name: &str) -> Result<Client, Failure> {
        let value_cache = self.chequer.as_ref().map_or(0, |of| of.value_cache);
        let (slot_cache, node_cache) = (self.sizes.slot_cache, self.node_cache);
        let options = Options { slot_cache, value_cache, node_cache, ..Options::default() };
        let kv = OneKv::open(seat.fabric(), node, name, &options).await?;
        Ok(Client { kv, seen: None })
    }

    fn draw(&self, scene: &Scene, client: &mut Client) -> (u64, Ask) {
        let random = scene.world.random();
        let key = random.below(scene.drawn.keys);
        let value = || self.value(scene, key);
        let ask = match random.below(16) {
            0..2 if self.chequer.is_some() => Ask::Contains,
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
            Ask::Contains => match kv.contains(&key).await? {
                true => Outcome::Present,
                false => Outcome::Absent,
            },
            Ask::Put(value) => {
                kv.put(&key, &values::bytes(value)).await.map_err(|error| self.failure(error))?;
                Outcome::Done(None)
            }
            Ask::Delete => {
                if kv.delete(&key).await.map_err(|error| self.failure(error))? {
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

    fn read(&self) -> Option<Ask> {
        Some(Ask::Get)
    }

    fn read_all(&self, scene: &Scene) -> Vec<(u64, Ask)> {
        (0..scene.drawn.keys).map(|key| (key, Ask::Get)).collect()
    }

    async fn audit(&self, scene: &Scene, node: &Node, store: &str) -> Result<(), String> {
        if !self.is_called() {
            let left = tables_left(node, store).await?;
            scene.count(|counts| counts.rebuilds += left);
        }
        if self.chequer.is_some() {
            compare_blocks(node, store).await?;
        }
        Ok(())
    }
}

/// Checks that each block in use of a Chequer store has the value of a record, and that each record in use has a block.
/// No client is alive, so nothing is reserved or held.
async fn compare_blocks(node: &Node, name: &str) -> Result<(), String> {
    let answered = node.answer(control::Ask::StoreStat { name: name.to_owned() }).await?;
    let Answer::StoreStat(stat) = answered else { return Err(format!("{answered:?}")) };
    let number = |row: &str| stat.service.get(row).copied().ok_or(format!("the store reports no {row}"));
    let (mut records, mut bytes) = (0, 0);
    let opened = node.answer(control::Ask::OpenStore { name: name.to_owned() }).await?;
    let Answer::Store(store) = opened else { return Err(format!("{opened:?}")) };
    for used in records_in_use(node, &store)? {
        (records, bytes) = (records + 1, bytes + u64::from(used.block.len));
    }
    let live = (number("pool_live_blocks")?, number("pool_live_bytes")?);
    if live != (records, bytes) {
        return Err(format!(
            "{} blocks of {} bytes are in use, and {records} records have blocks of {bytes} bytes",
            live.0, live.1
        ));
    }
    let reserved = (number("reservations")?, number("reserved_bytes")?);
    if reserved != (0, 0) {
        return Err(format!("{} reservations of {} bytes outlive all clients", reserved.0, reserved.1));
    }
    let of_pool = ["live_block", "quarantine", "fast", "mixed", "free"];
    let mut sum = 0;
    for part in of_pool {
        sum += number(&format!("pool_{part}_bytes"))?;
    }
    let area = number("pool_area_bytes")?;
    if sum == area {
        Ok(())
    } else {
        Err(format!("the pool has {area} bytes, and its parts {sum}: {stat:?}"))
    }
}

/// Returns the records of a Chequer store whose keys have values, read at one instant.
fn records_in_use(node: &Node, store: &Store) -> Result<Vec<Used>, String> {
    let table = Table::new(&store.parameters, store.extent())?;
    let (spec, memory) = (table.spec(), node.memory());
    let buckets = (0..spec.partitions).flat_map(|of| (0..spec.buckets()).map(move |bucket| (of, bucket)));
    let decoded = buckets.map(|(partition, bucket)| {
        let mut record = Record::new_zeroed();
        memory.peek(table.bucket_at(partition, bucket), record.as_mut_bytes());
        record.decode()
    });
    let used = decoded.filter_map(|content| match content {
        Bucket::Used(used) => Some(used),
        _ => None,
    });
    Ok(used.collect())
}

/// Returns the values of a Chequer store, by the numbers of their keys.
fn values_in_use(
    node: &Node,
    store: &Store,
    numbers: &BTreeMap<Vec<u8>, u64>,
) -> Result<BTreeMap<u64, Value>, String> {
    let mut values = BTreeMap::new();
    for Used { key, block, .. } in records_in_use(node, store)? {
        let mut bytes = vec![0; block.len as usize];
        node.memory().peek(block.at, &mut bytes);
        let key = key.in_record().or_else(|| key.in_block(&bytes)).ok_or("a block has no key")?;
        let number = *numbers.get(key).ok_or_else(|| format!("no client has put the key {key:?}"))?;
        let value = value_in(&bytes, key).and_then(values::known);
        let value = value.ok_or_else(|| format!("key {number} has bytes that no client has put"))?;
        if values.insert(number, value).is_some() {
            return Err(format!("key {number} has two records"));
        }
    }
    Ok(values)
}

/// Time for which an operation that was answered may be missing after a crash, beside the interval of syncs by a fast
/// clock: a few short operations of the disk.
const WRITTEN_WITHIN: Nanos = 10 * MILLIS;

/// Judges the values that a store has after it lost its last operations.
///
/// The log loses a suffix at most: if an operation is kept, then so are all that returned before it was called. With
/// `interval`, nothing is lost that was answered longer before than this. Both hold between two deaths of the node's
/// process. With a process, the records are lost that its log had not written; the memory has their effects until it is
/// lost, too.
///
/// # Errors
/// Returns a description of an operation that must not be lost, or of a value that must not be there.
fn judge_kept(
    values: &BTreeMap<u64, Value>,
    before: &[Operation],
    loss: &Loss,
    interval: Option<Nanos>,
) -> Result<bool, String> {
    let end = |of: &Operation| of.returned.map_or(u64::MAX, |returned| returned.index);
    let mut kept: BTreeMap<u64, &Operation> = BTreeMap::new();
    for (key, value) in values {
        let put = before.iter().find(|of| of.key == *key && of.ask == Ask::Put(*value));
        let put =
            put.ok_or_else(|| format!("after a crash, key {key} has the value {value} of another key"))?;
        if put.outcome == Outcome::Failed {
            return Err(format!("after a crash, key {key} has the value {value}, whose put has failed"));
        }
        kept.insert(*key, put);
    }
    let is_lost = |of: &Operation| match (kept.get(&of.key), of.ask) {
        (Some(put), _) => end(put) < of.called.index,
        // Absent, although no delete may have followed the put.
        (None, Ask::Put(_)) => !before.iter().any(|delete| {
            let is_delete = delete.key == of.key && delete.ask == Ask::Delete;
            is_delete
                && matches!(delete.outcome, Outcome::Done(_) | Outcome::Unknown)
                && end(delete) > of.called.index
        }),
        (None, _) => false,
    };
    let changed = before.iter().filter(|of| matches!(of.outcome, Outcome::Done(_)));
    let lost: Vec<&Operation> = changed.filter(|of| is_lost(of)).collect();
    for of in &lost {
        let returned = of.returned.expect("it is done");
        let death = loss.deaths.iter().copied().find(|death| *death > returned.ns);
        let later = kept
            .values()
            .find(|put| put.called.index > returned.index && death.is_none_or(|death| put.called.ns < death));
        if let Some(later) = later {
            return Err(format!(
                "after a crash, '{of}' of key {} is lost, and the later '{later}' is not",
                of.key
            ));
        }
        let time = death.unwrap_or(u64::MAX).min(*loss.deaths.last().unwrap_or(&u64::MAX));
        if let Some(interval) = interval
            && time_to_write(returned.ns, time, &loss.stalls) > interval
        {
            return Err(format!(
                "a crash at {time} ns has lost '{of}' of key {}, which was answered at {} ns",
                of.key, returned.ns
            ));
        }
    }
    Ok(!lost.is_empty())
}

/// Returns the time between two instants without the times in which the log could not be written.
fn time_to_write(from: Nanos, until: Nanos, stalls: &[[Nanos; 2]]) -> Nanos {
    /// Shorter operations of the disk are part of [`WRITTEN_WITHIN`].
    const SHORT: Nanos = MILLIS / 5;
    let mut stalls: Vec<[Nanos; 2]> =
        stalls.iter().copied().filter(|[start, end]| end - start > SHORT).collect();
    stalls.sort_unstable();
    let (mut at, mut time) = (from, 0);
    for [start, end] in stalls {
        time += start.clamp(at, until.max(at)) - at;
        at = at.max(end.min(until));
    }
    time + until.saturating_sub(at)
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
