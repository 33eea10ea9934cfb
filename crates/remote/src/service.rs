//! What a memory node's CPU does for a store: the two-sided half of a system.
//!
//! A node knows no system. It creates a store's service from a specification, hands it calls, and asks it which
//! buffers are still reachable. Invariant: a service touches its store's memory only by chains' own primitives,
//! so that clients' atomics hold against it too (PRISM gives no guarantee against the server's CPU).
//!
//! A call names the service by its store's region, and proves by the store's secret that it may be asked; so no call
//! reaches a store that has come to have another's region:
//!
//! ```text
//! request  | secret u64 | what the service is asked |
//! ```

use crate::fabric::ServiceId;
use crate::key::Key;
use crate::memory::Memory;
use crate::rights::Rights;

/// Where a store's table lies, and the key that opens it and the store's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Opens the store's region.
    pub key: Key,
    /// The address of the table's first byte.
    pub at: u64,
    /// Bytes of it, zero when the store is created.
    pub len: u64,
}

/// Bytes of a request to a store's service before what that is asked.
pub const ADDRESS_SIZE: usize = size_of::<u64>();

/// Begins a request to the service of the store that `key` opens, in place of what `request` held.
pub fn address(key: Key, request: &mut Vec<u8>) -> ServiceId {
    request.clear();
    request.extend_from_slice(&key.secret().to_le_bytes());
    ServiceId(key.region())
}

/// The key that a request to a store's service came with, and what the service is asked.
///
/// # Errors
/// There is no key in it.
pub fn addressed(service: ServiceId, request: &[u8]) -> Result<(Key, &[u8]), String> {
    match request.split_first_chunk() {
        Some((secret, asked)) => Ok((Key::new(service.0, u64::from_le_bytes(*secret)), asked)),
        None => Err(format!(
            "no store has a service numbered {} that answers {} bytes: a request begins with the {ADDRESS_SIZE} bytes \
             of the store's secret",
            service.0,
            request.len()
        )),
    }
}

/// What a service is asked.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// What the caller's key opens the store for.
    pub rights: Rights,
    /// In the system's own words. Input, like all that peers write.
    pub request: &'a [u8],
}

/// The service of one store.
pub trait Service<M: Memory>: Send {
    /// Answers a call, in a bounded number of accesses. `answer` is empty, and is to hold at most
    /// [`CALL_BYTES_MAX`](crate::fabric::CALL_BYTES_MAX) bytes.
    ///
    /// Where memory answers *wait*, the same call is made again from its beginning, with the answers so far: so what
    /// it asks of memory is a function of those, and `self` changes only once the last access was answered. One call
    /// is made at a time; nobody else is let in before it is answered.
    ///
    /// The inner result is the answer, or a refusal: why nothing was done, and what to do about it.
    fn call(
        &mut self,
        _memory: &M,
        _call: Call<'_>,
        _answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        Ok(Err(
            "a store of this kind answers no calls, its clients do all by chains: open it as what it is, or \
                open another store"
                .into(),
        ))
    }

    /// Finds more of the buffers that the structure reaches, beginning at `cursor` (0 at first), in at most about
    /// 16 accesses; puts their addresses into `found`. Answers where to go on, or nothing at the end.
    fn live(&self, memory: &M, cursor: u64, found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait>;

    /// A step of what the structure wants done without being asked, in at most about 16 accesses; changes nothing of
    /// its own but after the last of them.
    fn tick(&mut self, _memory: &M) -> Result<Tick, M::Wait> {
        Ok(Tick::Idle)
    }

    /// The service as one that gives its store another table, if it can.
    fn rebuild(&mut self) -> Option<&mut dyn Rebuild<M>> {
        None
    }
}

/// What a service's own step came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tick {
    /// There was nothing to do, until somebody changes something.
    Idle,
    /// Something was done: have it make another.
    Made,
}

/// A service that gives its store another table while the store is used: it says which, and once it has both, moves
/// what is in the former one.
pub trait Rebuild<M: Memory> {
    /// Whether its ticks have found the table crowded since this was asked last.
    fn is_crowded(&mut self) -> bool {
        false
    }

    /// Begins to survey what is in its tables, for a table such as these parameters say: [`Rebuild::step`] answers
    /// which. `quota` is the most bytes that its buffers take; `entropy` is random.
    ///
    /// # Errors
    /// It cannot have such a table.
    fn survey(&mut self, parameters: &str, quota: u64, entropy: u64) -> Result<(), String>;

    /// The service of the store on its way from former tables, oldest first, each with its parameters, to the table
    /// that this service, which [`Kind::serve`] has made, has alone.
    ///
    /// # Errors
    /// The parameters are not such as [`Step::Wants`] answers.
    fn succeed(&mut self, _formers: &[(&str, Extent)]) -> Result<Box<dyn Service<M>>, String> {
        Err("the service has former tables already".into())
    }

    /// A step of the survey that was begun, or else of the move, in at most about 16 accesses; changes nothing of its
    /// own but after the last of them. `dropped` takes buffers that it has made RETIRED and the node's
    /// ([`crate::arena::Arena::condemn`]): they come back like any.
    fn step(&mut self, memory: &M, dropped: &mut Vec<u64>) -> Result<Step, M::Wait>;

    /// How much it has moved from its former tables, in percent.
    fn moved_percent(&self) -> u8 {
        0
    }
}

/// What a step of a survey or of a move came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Something was done: have it make another.
    Made,
    /// The survey has ended: the store is to have a table like this, and [`Rebuild::succeed`] is to serve both.
    Wants(Plan),
    /// The survey has ended: the store needs no other table, and is not rebuilt.
    Content,
    /// The move has ended: nothing is in the former tables any more.
    Moved,
    /// The next table has no place for all: a further one may be surveyed for.
    Stuck,
}

/// A kind of store that a node can create.
pub trait Kind<M: Memory>: Send + Sync {
    /// The name by which stores ask for it.
    fn name(&self) -> &'static str;

    /// Bytes of table that a store with these parameters needs. `entropy` is random, for hash seeds and the like;
    /// what the kind wants to keep of it goes into the answered parameters, which are stored in the catalog and
    /// handed to every client.
    ///
    /// # Errors
    /// What is wrong with the parameters, and what would be right.
    fn plan(&self, parameters: &str, quota: u64, entropy: u64) -> Result<Plan, String>;

    /// The service of a store that was planned with these parameters and has this table.
    ///
    /// # Errors
    /// The parameters are not such as [`Kind::plan`] answers.
    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String>;
}

/// What a store needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Bytes of table, before rounding up to whole segments.
    pub table_len: u64,
    /// The parameters as every client will see them.
    pub parameters: String,
    /// Whether words of 24 and 32 bytes are compared and swapped in it. Its chains are then run by the node's engines
    /// alone, on [`Memory`] that is wide: those of clients that run them themselves would not take the locks.
    pub wide: bool,
}
