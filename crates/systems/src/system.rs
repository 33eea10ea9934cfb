//! The [`System`] trait: everything that the registry knows about a system.
//!
//! Invariant: code that lists, names or selects systems uses this trait. A single system is named only in its own
//! folder and in its line of [`crate::registry`].

use crate::blocks::Stripe;
use crate::index::{Combining, Indexing};
use crate::latch::Latching;
use crate::store::{Members, StoreError};
use crate::txn::Transacting;
use farside_remote::clock::Clock;
use farside_remote::control::MEMBERS_MAX;
use farside_remote::mutant::Mutant;
use farside_remote::service::Kind;
use farside_remote::{Capabilities, Fabric, Memory};
use std::time::Duration;

/// Family of systems with the same operations. All systems of a family implement the same trait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Stores of keys and values, which implement [`crate::kv::Kv`].
    Kv,
    /// Stores of values in order, which implement [`crate::queue::Queue`].
    Queue,
    /// Stores of blocks of one size, which implement [`crate::blocks::Blocks`].
    Blocks,
    /// Stores of objects that are updated in place under locks, which are [`crate::guarded`].
    Objects,
    /// Stores of objects under one-sided latches, which are [`crate::latch::Latched`].
    Latched,
    /// Ordered maps, which implement [`crate::index::Index`].
    Index,
    /// Stores of keys and values that are changed by transactions, which implement [`crate::txn::Txn`].
    Txn,
    /// Nodes that answer requests for measurements, which are [`crate::rpc::echo::Echo`].
    Calls,
    /// Plain memory for measurements, which is [`crate::raw::Raw`].
    Memory,
}

impl Family {
    /// Noun for a store of this family, with its article.
    pub const fn noun(self) -> &'static str {
        match self {
            Family::Kv => "a key-value store",
            Family::Queue => "a queue",
            Family::Blocks => "a block store",
            Family::Objects => "a store of guarded objects",
            Family::Latched => "a store of latched objects",
            Family::Index => "an index",
            Family::Txn => "a transactional store",
            Family::Calls => "a service for measurements",
            Family::Memory => "plain memory",
        }
    }

    /// Plural noun for the contents of a store of this family, for messages.
    pub const fn contents(self) -> &'static str {
        match self {
            Family::Kv => "keys",
            Family::Queue => "values in order",
            Family::Blocks => "blocks",
            Family::Objects => "objects",
            Family::Latched => "latched objects",
            Family::Index => "keys in order",
            Family::Txn => "keys under transactions",
            Family::Calls => "nothing",
            Family::Memory => "slots",
        }
    }

    /// Command that reads and changes stores of this family, if there is one.
    pub const fn command(self) -> Option<&'static str> {
        match self {
            Family::Kv => Some("farside kv"),
            Family::Blocks => Some("farside volume"),
            Family::Index => Some("farside index"),
            Family::Txn => Some("farside txn"),
            Family::Queue | Family::Objects | Family::Latched | Family::Calls | Family::Memory => None,
        }
    }
}

/// Distribution of a store over nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nodes {
    /// The whole store lies on one node.
    One,
    /// Each part of the store lies on one of several nodes.
    Shards,
    /// Each of 2f + 1 nodes holds the whole store.
    Replicas,
    /// The store lies on several nodes, whose processes also run its clients.
    Symmetric,
}

/// Size of a store and of its items.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizing {
    /// Number of items that the table must hold; if absent, derived from the quota.
    pub items: Option<u64>,
    /// Length of a key in bytes.
    pub key_len: usize,
    /// Length of a value in bytes.
    pub value_len: usize,
    /// Whether a key of 8 bytes is a number that has its own slot, so that no keys collide.
    pub collision_free: bool,
    /// Number of ids of clients that write, in systems with such ids; if absent, the system's default. Ids are not
    /// reused.
    pub writers: Option<u32>,
    /// Part of a striped volume that the store holds; only for block stores.
    pub stripe: Option<Stripe>,
    /// Number of buckets that a client reads at once, in systems in which it is an option; if absent, the system's
    /// default.
    pub block_buckets: Option<u64>,
    /// Length in bytes from which a client writes a value itself, in systems in which it is an option; if absent, the
    /// system's default.
    pub put_threshold: Option<u32>,
    /// Number of parts of the table that calls change at the same time, in systems in which it is an option; if absent,
    /// derived from the store's size.
    pub partitions: Option<u64>,
    /// How clients synchronize, and where latches lie; only for stores of latched objects.
    pub latching: Latching,
    /// Kind of the keys, and how clients share memory; only for indexes.
    pub indexing: Indexing,
    /// Ids, logs and validation of clients; only for transactional stores.
    pub transacting: Transacting,
    /// Length of the leases of clients. If absent, that of the system, or none in systems in which leases are an
    /// option.
    pub lease: Option<Duration>,
    /// Random number of the store, the same for all its members; if absent, each member draws its own.
    pub seed: Option<u64>,
}

impl Sizing {
    /// Parameters of a store of this size, for systems with a table of items.
    pub fn parameters(&self) -> String {
        let placement = if self.collision_free { "permuted" } else { "hashed" };
        serde_json::json!({ "items": self.items, "placement": placement }).to_string()
    }
}

/// Memory that a store takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Number of slots of the table.
    pub slots: u64,
    /// Size of the table in bytes.
    pub table_bytes: u64,
    /// Size in bytes of the buffers of one item, including the node's state for these buffers.
    pub item_bytes: u64,
}

/// Shape of a table that the system can rebuild.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Number of the table (epoch), which grows with every rebuild.
    pub epoch: u64,
    /// Number of slots of the table.
    pub slots: u64,
    /// Number of items that the table can hold.
    pub items: u64,
    /// Whether a key of 8 bytes is a number that has its own slot, so that no keys collide.
    pub is_collision_free: bool,
}

/// Reason why no store with a given [`Sizing`] is possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizingError {
    /// No table can hold the requested number of items.
    Items,
    /// The value is too long for a key of the given length. The longest possible value has this number of bytes.
    Value(usize),
    /// A transaction of the given size is too long. The longest possible one writes this number of bytes at one member.
    Writes(u32),
}

impl SizingError {
    /// Checks the number of bytes that a transaction writes at one member.
    ///
    /// # Errors
    /// [`SizingError::Writes`] if it is more than `max`.
    pub(crate) fn check_writes(sizing: &Sizing, max: u32) -> Result<(), SizingError> {
        match sizing.transacting.writes_max {
            Some(writes) if writes > max => Err(SizingError::Writes(max)),
            _ => Ok(()),
        }
    }
}

/// CPU work of a system's clients and service, for cost models. Fabrics do not count this work.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Number of chains that a GET runs for each slot that it probes.
    pub chains_per_probe: u32,
    /// Number of memory accesses of the service that miss its caches during one PUT.
    pub call_accesses: u64,
    /// Returns the number of bytes that the service checksums for one call. The arguments are the request, and the
    /// number of bytes of the node's memory that the call has read.
    pub call_checksummed: fn(&[u8], u64) -> u64,
    /// Returns the number of bytes that a client checksums for a GET.
    pub get_checksummed: fn(&Got) -> u64,
    /// Returns the number of bytes that a client checksums for a PUT. The argument after the client's options is the
    /// length of the value in bytes.
    pub put_checksummed: fn(&Options, usize) -> u64,
    /// Time for which the memory of a replaced value is not used again.
    pub quarantine: Duration,
}

/// A GET that has found its key, for cost models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Got {
    /// Length of the key in bytes.
    pub key_len: usize,
    /// Length of the value in bytes.
    pub value_len: usize,
    /// Number of bytes that the GET's chains have returned.
    pub returned: u64,
}

impl Work {
    /// Work of a system whose GET runs one chain for each probe, and that has no other work.
    pub const CHAINS: Work = Work {
        chains_per_probe: 1,
        call_accesses: 0,
        call_checksummed: |_, _| 0,
        get_checksummed: |_| 0,
        put_checksummed: |_, _| 0,
        quarantine: Duration::ZERO,
    };
}

/// Options of a client. A system ignores the options that do not apply to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Number of keys whose slots the client caches. A PUT of a cached key takes one round trip.
    pub slot_cache: usize,
    /// Number of bytes in which the client caches values, in systems whose clients can tell that a value is current.
    pub value_cache: usize,
    /// Number of bytes in which the client caches inner nodes, in systems with trees; if absent, the system's default.
    pub node_cache: Option<usize>,
    /// How the operations of a client on one key share requests, in systems in which it is an option.
    pub combining: Combining,
    /// Length in bytes from which a client writes a value itself; if absent, that of the store.
    pub put_threshold: Option<usize>,
    /// Random bits, drawn anew for each client. A client that draws nonces derives them from these bits.
    pub entropy: u64,
    /// Whether a lock is released by a request of its own, after the write under it was answered.
    pub releases_apart: bool,
    /// Time of silence after which the nodes end a session; if absent, that of `farside serve`.
    pub silence: Option<Duration>,
    /// Pauses between attempts to take locks; if absent, the system's own.
    pub backoff: Option<Backoff>,
    /// Time for which an operation tries to take a latch or to read an object whole; if absent, the system's own.
    pub patience: Option<Duration>,
}

impl Options {
    /// No options: the same as the default, as a constant.
    pub const NONE: Options = Options {
        slot_cache: 0,
        value_cache: 0,
        node_cache: None,
        combining: Combining::Batches,
        put_threshold: None,
        entropy: 0,
        releases_apart: false,
        silence: None,
        backoff: None,
        patience: None,
    };
}

/// Pauses between attempts. The pause after an attempt is random, below a limit that doubles with each attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// Limit after the first attempt.
    pub first: Duration,
    /// Largest limit.
    pub longest: Duration,
}

impl Backoff {
    /// No pauses.
    pub const NONE: Backoff = Backoff { first: Duration::ZERO, longest: Duration::ZERO };
}

/// A system as the registry sees it: constants, and functions that create its parts.
#[allow(async_fn_in_trait, reason = "an endpoint belongs to one thread: no Send bound is wanted")]
pub trait System: 'static {
    /// Name of the system in the catalog, in flags and in reports: `prism-kv`.
    const KIND: &'static str;
    /// Name of the system as its paper writes it: `PRISM-KV`.
    const TITLE: &'static str;
    /// Cost of the system's operations, in a few words for help texts.
    const SUMMARY: &'static str;
    /// Family to which the system belongs.
    const FAMILY: Family;
    /// Distribution of the system's stores over nodes.
    const NODES: Nodes = Nodes::One;
    /// Largest number of members of a store that lies on several nodes.
    const MEMBERS_MAX: usize = MEMBERS_MAX;
    /// Whether [`System::heal`] replaces members that have lost their memory.
    const REPLACES_MEMBERS: bool = false;
    /// Whether the system exists for tests only. If so, no node of `farside` serves it.
    const FOR_TESTS: bool = false;
    /// Capabilities that the operations need from a fabric. [`Capabilities::CALLS`] is listed only if operations call
    /// the system's own service. The call to the node that opens a store does not count.
    const NEEDS: Capabilities;
    /// Mutants: variants with one deliberate bug each, which the tests must detect.
    const MUTANTS: &'static [Mutant] = &[];
    /// Mutants that trials expose too seldom. Tests of single steps detect these mutants.
    const RARE_MUTANTS: &'static [Mutant] = &[];
    /// CPU work of the system's clients and service, for cost models.
    const WORK: Work = Work::CHAINS;

    /// Type of a client of a store. The type implements the trait of the system's family.
    type Client<F: Fabric + Clock>;

    /// Returns the parameters of a store of this size, in the form that the system's [`System::kind`] takes.
    fn parameters(sizing: &Sizing) -> String {
        sizing.parameters()
    }

    /// Returns the memory that a store of this size takes.
    ///
    /// # Errors
    /// No store of this size is possible.
    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError>;

    /// Returns the shape of the table that these catalog parameters describe, or `None` if the system cannot rebuild
    /// tables.
    fn shape(_parameters: &str) -> Option<Shape> {
        None
    }

    /// Returns the number of members whose memory a store with these catalog parameters and so many members may lose at
    /// the same time, and keep all items: [`System::heal`] replaces these members.
    fn losses(_parameters: &str, members: usize) -> usize {
        if Self::REPLACES_MEMBERS { members.saturating_sub(1) / 2 } else { 0 }
    }

    /// Returns the node-side half of the system.
    fn kind<M: Memory>() -> Box<dyn Kind<M>>;

    /// Creates a client of the store that `members` describe. Implementations check with [`Members::one_of`] that this
    /// system can use the store over `fabric`.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed.
    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<Self::Client<F>, StoreError>;

    /// Repairs what dead clients and lost replicas have left in the store that `members` describe. Returns a sentence
    /// for each repair. Runs as a client, beside other clients and other recoverers, any of which may die at any point.
    /// A system whose operations complete what they find unfinished has nothing to repair. The members of a store of
    /// replicas may have no keys, if no member gives clients one.
    ///
    /// # Errors
    /// [`StoreError`]; the store is as correct as before.
    async fn heal<F: Fabric + Clock>(
        _fabric: F,
        _members: &Members,
        _options: &Options,
    ) -> Result<Vec<String>, StoreError> {
        Ok(Vec::new())
    }
}
