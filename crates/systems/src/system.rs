//! What the registry knows of a system: the one trait by which everything that is enumerated is generated.
//!
//! Invariant: whatever lists systems, names one or chooses one asks this trait; so nothing outside a system's folder
//! and its line in [`crate::registry`] names it.

use crate::store::{Members, StoreError};
use farside_remote::clock::Clock;
use farside_remote::mutant::Mutant;
use farside_remote::service::Kind;
use farside_remote::{Capabilities, Fabric, Memory};

/// What a system is to its users: each family has one trait, which all of its systems implement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Keys and values: [`crate::kv::Kv`].
    Kv,
    /// Values in order: [`crate::queue::Queue`].
    Queue,
    /// Plain memory, to measure with: [`crate::raw::Raw`].
    Memory,
}

impl Family {
    /// A store of it, in a sentence.
    pub const fn noun(self) -> &'static str {
        match self {
            Family::Kv => "a key-value store",
            Family::Queue => "a queue",
            Family::Memory => "plain memory",
        }
    }

    /// What its stores hold.
    pub const fn contents(self) -> &'static str {
        match self {
            Family::Kv => "keys",
            Family::Queue => "values in order",
            Family::Memory => "slots",
        }
    }
}

/// On which nodes a store lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nodes {
    /// On one.
    One,
    /// Each part of it on one of several.
    Shards,
    /// All of it on each of 2f + 1.
    Replicas,
    /// On several, whose processes run its clients, too.
    Symmetric,
}

/// What a store is made for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizing {
    /// Items that the table has room for; from the quota if absent.
    pub items: Option<u64>,
    /// Bytes of a key.
    pub key_len: usize,
    /// Bytes of a value.
    pub value_len: usize,
    /// Keys of 8 bytes are numbers that have a slot each.
    pub collision_free: bool,
}

impl Sizing {
    /// The parameters of a store of this size, as systems with tables of items take them.
    pub fn parameters(&self) -> String {
        let placement = if self.collision_free { "permuted" } else { "hashed" };
        serde_json::json!({ "items": self.items, "placement": placement }).to_string()
    }
}

/// How much memory a store takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Slots of the table.
    pub slots: u64,
    /// Bytes of the table.
    pub table_bytes: u64,
    /// Bytes of the buffers of one item, with what the node keeps of them.
    pub item_bytes: u64,
}

/// A table of slots that a system can replace by another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Grows with every rebuild.
    pub epoch: u64,
    /// Slots of the table.
    pub slots: u64,
    /// Items that it has room for.
    pub items: u64,
    /// Whether keys of 8 bytes are numbers that have a slot each.
    pub is_collision_free: bool,
}

/// Why there is no store of a [`Sizing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// No table has room for so many items.
    Items,
    /// A value is longer than this many bytes, which a value can have beside such a key.
    Value(usize),
}

/// Work of clients and service that no fabric counts, for models of cost.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Chains that a GET takes for each slot that it looks at.
    pub chains_per_probe: u32,
    /// Accesses of the service to memory that no cache has, for a PUT.
    pub call_accesses: u64,
    /// Bytes that the service brings into checksums for a request of so many bytes.
    pub call_checksummed: fn(usize) -> u64,
    /// Bytes that a client brings into checksums to get a value, by bytes of the key and of the value.
    pub get_checksummed: fn(usize, usize) -> u64,
}

impl Work {
    /// One chain a probe, and nothing else.
    pub const CHAINS: Work =
        Work { chains_per_probe: 1, call_accesses: 0, call_checksummed: |_| 0, get_checksummed: |_, _| 0 };
}

/// Options of a client. A system ignores those that it has no use for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Keys whose slots the client remembers, so that they are put in one round trip.
    pub slot_cache: usize,
}

/// A system, as the registry knows it.
#[allow(async_fn_in_trait, reason = "an endpoint belongs to one thread: no Send bound is wanted")]
pub trait System: 'static {
    /// Its name in the catalog, in flags and in reports: `prism-kv`.
    const KIND: &'static str;
    /// Its name as its paper writes it: `PRISM-KV`.
    const TITLE: &'static str;
    /// What its operations cost, in a few words for help texts.
    const SUMMARY: &'static str;
    /// What it is to its users.
    const FAMILY: Family;
    /// On which nodes a store lies.
    const NODES: Nodes = Nodes::One;
    /// Whether it is for tests alone: no node of `farside` serves it.
    const FOR_TESTS: bool = false;
    /// Capabilities that its operations need of a fabric. Calls are those to its own service: opening a store always
    /// takes one to the node, and is not counted.
    const NEEDS: Capabilities;
    /// Its broken variants, which its tests find.
    const MUTANTS: &'static [Mutant] = &[];
    /// The broken variants among them that trials find too seldom: tests of single steps find them.
    const RARE_MUTANTS: &'static [Mutant] = &[];
    /// What models of cost need.
    const WORK: Work = Work::CHAINS;

    /// The client of a store; implements the trait of the family.
    type Client<F: Fabric + Clock>;

    /// The parameters of a store, as [`System::kind`] takes them.
    fn parameters(sizing: &Sizing) -> String {
        sizing.parameters()
    }

    /// The memory that a store takes.
    ///
    /// # Errors
    /// There is no such store.
    fn footprint(sizing: &Sizing) -> Result<Footprint, Misfit>;

    /// The table of a store with such parameters in the catalog, if the system can give it another.
    fn shape(_parameters: &str) -> Option<Shape> {
        None
    }

    /// The node's half.
    fn kind<M: Memory>() -> Box<dyn Kind<M>>;

    /// A client of a store that its members' catalogs describe so. [`Members::one_of`] checks that this system can use
    /// them over that fabric.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed.
    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<Self::Client<F>, StoreError>;
}
