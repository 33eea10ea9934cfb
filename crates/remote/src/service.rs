//! The two-sided half of a system: the service that a memory node's CPU runs for a store.
//!
//! The node has no code for any system. It creates a store's service through a [`Kind`], passes calls to the service,
//! and asks the service which buffers are reachable.
//! Invariant: a service accesses its store's memory only with the primitives that chains use, so that clients' atomics
//! are atomic with respect to it too (PRISM gives no such guarantee for the server's CPU).
//!
//! A call names the service by the store's region, and its request begins with the store's secret. So a call cannot
//! reach another store to which the region was reassigned:
//!
//! ```text
//! request  | secret u64 | the service's request |
//! ```

use crate::fabric::ServiceId;
use crate::key::Key;
use crate::memory::Memory;
use crate::rights::Rights;

/// The location of a store's table, and the key that opens this table and the store's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Key of the store's region.
    pub key: Key,
    /// Address of the table's first byte.
    pub at: u64,
    /// Size of the table in bytes. All its bytes are zero when the store is created.
    pub len: u64,
}

/// Size of the store's secret at the start of a request to a store's service, in bytes.
pub const ADDRESS_SIZE: usize = size_of::<u64>();

/// Starts a request to the service of the store that `key` opens. Replaces the contents of `request`. Returns the
/// service to call.
pub fn address(key: Key, request: &mut Vec<u8>) -> ServiceId {
    request.clear();
    request.extend_from_slice(&key.secret().to_le_bytes());
    ServiceId(key.region())
}

/// Splits a request to a store's service into its key and the service's own request.
///
/// # Errors
/// The request is too short to hold a key.
pub fn addressed(service: ServiceId, request: &[u8]) -> Result<(Key, &[u8]), String> {
    match request.split_first_chunk() {
        Some((secret, asked)) => Ok((Key::new(service.0, u64::from_le_bytes(*secret)), asked)),
        None => Err(format!(
            "no store has a service numbered {} for a request of {} bytes: a request begins with the {ADDRESS_SIZE} \
             bytes of the store's secret",
            service.0,
            request.len()
        )),
    }
}

/// A call to a service.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The caller's rights to the store.
    pub rights: Rights,
    /// The request, in the system's own format. Untrusted input.
    pub request: &'a [u8],
}

/// The service of one store.
pub trait Service<M: Memory>: Send {
    /// Serves a call, in a bounded number of accesses. `answer` is empty at the start; the service appends the response
    /// of at most [`CALL_BYTES_MAX`](crate::fabric::CALL_BYTES_MAX) bytes.
    ///
    /// If memory returns *wait*, the same call is made again from its start, with the results so far replayed.
    /// Therefore its accesses must be a function of those results, and `self` may change only after the last access has
    /// completed. The node passes one call at a time, and the next one after this call's response.
    ///
    /// The inner result is the response, or a refusal: why nothing was done, and the remedy.
    fn call(
        &mut self,
        _memory: &M,
        _call: Call<'_>,
        _answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        Ok(Err(
            "stores of this kind serve no calls, only chains: open it with a client for its kind, or open \
                another store"
                .into(),
        ))
    }

    /// Continues the search for buffers that the structure reaches, from `cursor` (initially 0), in at most about 16
    /// accesses. Adds the addresses of these buffers to `found`. Returns the next cursor, or `None` at the end.
    fn live(&self, memory: &M, cursor: u64, found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait>;

    /// Performs one step of the structure's background work, in at most about 16 accesses. The service must not change
    /// `self` before the step's last access.
    fn tick(&mut self, _memory: &M) -> Result<Tick, M::Wait> {
        Ok(Tick::Idle)
    }

    /// The interface for giving the store another table, or `None` if the service has no such interface.
    fn rebuild(&mut self) -> Option<&mut dyn Rebuild<M>> {
        None
    }
}

/// Outcome of a step of background work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tick {
    /// The step found nothing to do, and no step will until the store changes.
    Idle,
    /// The step did something: call again.
    Made,
}

/// A service that gives its store another table while the store is in use. The service chooses the size of the next
/// table. Once the node has granted that table, the service moves the entries of the former one.
pub trait Rebuild<M: Memory> {
    /// Whether [`Service::tick`] has found the table crowded since the previous call of this function.
    fn is_crowded(&mut self) -> bool {
        false
    }

    /// Starts a survey of the store's tables, to plan a table with these parameters. [`Rebuild::step`] returns the
    /// plan. `quota` is the maximum size of the store's buffers in bytes; `entropy` is random.
    ///
    /// # Errors
    /// The store cannot have such a table.
    fn survey(&mut self, parameters: &str, quota: u64, entropy: u64) -> Result<(), String>;

    /// Returns the service of the store during the move. `self`, created by [`Kind::serve`], has only the new table.
    /// The returned service moves entries from the former tables, oldest first, each with its parameters, to that
    /// table.
    ///
    /// # Errors
    /// The parameters are not those of a [`Step::Wants`].
    fn succeed(&mut self, _formers: &[(&str, Extent)]) -> Result<Box<dyn Service<M>>, String> {
        Err("the service has former tables already".into())
    }

    /// Performs one step of the survey in progress, or else of the move, in at most about 16 accesses. The service must
    /// not change `self` before the step's last access. Adds to `dropped` the buffers that it has made RETIRED and
    /// owned by the node ([`crate::arena::Arena::condemn`]). The node frees these buffers after a grace period.
    fn step(&mut self, memory: &M, dropped: &mut Vec<u64>) -> Result<Step, M::Wait>;

    /// Progress of the move from the former tables, in percent.
    fn moved_percent(&self) -> u8 {
        0
    }
}

/// Outcome of a step of a survey or of a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The step did something: call again.
    Made,
    /// The survey is complete: the store needs this table. [`Rebuild::succeed`] then returns a service for the old and
    /// new tables.
    Wants(Plan),
    /// The survey is complete: the store needs no other table, so it is not rebuilt.
    Content,
    /// The move is complete: the former tables are empty.
    Moved,
    /// The new table has no space for all entries of the former tables: another table may be surveyed.
    Stuck,
}

/// A kind of store that a node can create.
pub trait Kind<M: Memory>: Send + Sync {
    /// The kind's name, as requests contain it.
    fn name(&self) -> &'static str;

    /// Plans a store: its table's size and its final parameters. `entropy` is random, for example for a hash seed; the
    /// kind stores the random bits that it needs in the returned parameters. The catalog keeps these parameters and
    /// passes them to every client.
    ///
    /// # Errors
    /// The parameters are invalid. The message names the error and the remedy.
    fn plan(&self, parameters: &str, quota: u64, entropy: u64) -> Result<Plan, String>;

    /// Creates the service of a store that was planned with these parameters and has this table.
    ///
    /// # Errors
    /// The parameters are not from a plan of [`Kind::plan`].
    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String>;
}

/// The resources that a store needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Size of the table in bytes, before rounding up to whole segments.
    pub table_len: u64,
    /// The parameters that every client will see.
    pub parameters: String,
    /// Whether the store uses CAS on words of 24 and 32 bytes. If so, only the node's engines run its chains, on wide
    /// [`Memory`]: clients that run chains themselves would not take the locks of wide words.
    pub wide: bool,
}
