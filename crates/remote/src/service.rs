//! The two-sided half of a system: the service that a memory node's CPU runs for a store.
//!
//! The node has no code for any system. It creates a store's service through a [`Kind`], passes calls to the service,
//! and asks the service which buffers are reachable.
//! Invariant: a service accesses its store's memory only with the primitives that chains use, so that clients' atomics
//! are atomic with respect to it too (PRISM gives no such guarantee for the server's CPU).
//! Invariant: whatever a service does is a function of its request, of its [`Context`], and of the results of its
//! accesses. So a call or a step that memory has made wait runs again from its start, and does nothing twice.
//!
//! The node runs work of one store in parallel, as far as the work's [`Locks`] permit. It takes these locks before the
//! first access and holds them until the work is done. A service that names no locks gets one call or step at a time.
//!
//! A call names the service by the store's region, and its request begins with the store's secret. So a call cannot
//! reach another store to which the region was reassigned:
//!
//! ```text
//! request  | secret u64 | the service's request |
//! ```

use crate::draws::Draws;
use crate::fabric::ServiceId;
use crate::key::Key;
use crate::leases::LeaseTable;
use crate::memory::Memory;
use crate::rights::Rights;
use std::time::Duration;

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
    /// Number of the caller's session. No two sessions of one memory have the same number. `None` if the node's own
    /// process calls without a session.
    pub session: Option<u32>,
    /// The request, in the system's own format. Untrusted input.
    pub request: &'a [u8],
}

/// Everything that a call, or a step of background work, may use besides its request. All of it is the same each time
/// that the work runs again.
#[derive(Debug)]
pub struct Context<'a, M: Memory> {
    /// The node's memory. All that the work changes for others lies there.
    pub memory: &'a M,
    /// Time when the work began, by the node's monotonic clock, which [`Tick::At`] uses, too. It may be a few
    /// milliseconds old.
    pub now: Duration,
    /// Random draws of this piece of work. Their seed is the host's randomness, so draws of other work say nothing
    /// about them. But one of them reveals the others: give no client more than one, or a hash, if they must not be
    /// guessed.
    pub random: Draws,
    /// An empty buffer. It saves the service an allocation, and its contents are lost at the end of the work.
    pub scratch: &'a mut Vec<u8>,
    /// Takes the records that a call appends to the store's log ([`Service::finish`]). Other work appends none.
    pub log: &'a mut Records,
}

/// Records of a store's log, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Records {
    bytes: Vec<u8>,
    /// End of each record in `bytes`.
    ends: Vec<usize>,
}

impl Records {
    /// Appends a record.
    ///
    /// # Panics
    /// The record is empty. The log reserves empty records for itself.
    pub fn append(&mut self, record: &[u8]) {
        assert!(!record.is_empty(), "a record of a log has at least one byte");
        self.bytes.extend_from_slice(record);
        self.ends.push(self.bytes.len());
    }

    /// Iterates over the records.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| &self.bytes[start..end])
    }

    /// Number of records.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no record.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Size of all records together in bytes.
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// Removes all records.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.ends.clear();
    }
}

/// A piece of a service's work.
#[derive(Clone, Copy, Debug)]
pub enum Work<'a> {
    /// A call with this request. Untrusted input.
    Call(&'a [u8]),
    /// The second part of a call, [`Service::finish`] or [`Service::undo`], with what the first part has left.
    Finish(&'a [u8]),
    /// A step of [`Service::live`] or of [`Service::checkpoint`].
    Live,
    /// A step of [`Service::tick`].
    Tick,
}

/// A set of a store's locks. Work whose sets have a lock in common does not run at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Locks(pub u64);

impl Locks {
    /// Number of a store's locks.
    pub const COUNT: u32 = u64::BITS;
    /// No lock: the work may run together with any other work.
    pub const NONE: Locks = Locks(0);
    /// Lock number 0, which all work of a service takes that names no locks.
    pub const ONE: Locks = Locks(1);
    /// All locks: the work runs alone.
    pub const ALL: Locks = Locks(u64::MAX);

    /// The lock for objects with this hash.
    pub const fn of(hash: u64) -> Locks {
        Locks(1 << (hash % Locks::COUNT as u64))
    }

    /// The locks of both sets.
    #[must_use]
    pub const fn and(self, other: Locks) -> Locks {
        Locks(self.0 | other.0)
    }
}

/// The service of one store. Several threads may use it at a time.
pub trait Service<M: Memory>: Send + Sync {
    /// Serves a call, in a bounded number of accesses. `answer` is empty at the start; the service appends the response
    /// of at most [`CALL_BYTES_MAX`](crate::fabric::CALL_BYTES_MAX) bytes.
    ///
    /// If memory returns *wait*, the same call is made again from its start, with the results so far replayed and the
    /// same context. So its accesses must be a function of those, and it may change the service's own state only after
    /// its last access. The locks of [`Work::Call`] are held from before its first access until it is done.
    ///
    /// The inner result is the response, or a refusal: why nothing was done, and the remedy.
    fn call(
        &self,
        _context: Context<'_, M>,
        _call: Call<'_>,
        _answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        Ok(Err(
            "stores of this kind serve no calls, only chains: open it with a client for its kind, or open \
                another store"
                .into(),
        ))
    }

    /// Second part of a call that has appended records to its context's log. The node calls it once the records count
    /// as stored under the node's policy, on disk or not yet. `begun` is what [`Service::call`] left in its `answer`.
    /// The response goes into `answer`, which is empty at the start.
    ///
    /// So [`Service::call`] changes nothing that others see. It may reserve memory, note in `answer` what it has
    /// reserved, and append its records. They take effect on the log when the call is done, while its locks are held:
    /// the log has the records of calls with a lock in common in the order in which these calls ran. The second parts
    /// of such calls may come in another order. So records name an order of their own, such as a stamp, by which the
    /// newest one wins here and in [`Service::replay`].
    ///
    /// A node without a log calls it at once.
    fn finish(
        &self,
        _context: Context<'_, M>,
        _begun: &[u8],
        _answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        unreachable!("only a service that appends records finishes calls")
    }

    /// Undoes the first part of a call whose records were not stored, instead of [`Service::finish`]. The node responds
    /// to the caller.
    fn undo(&self, _context: Context<'_, M>, _begun: &[u8]) -> Result<(), M::Wait> {
        unreachable!("only a service that appends records undoes calls")
    }

    /// Carries out a record that an earlier node has stored. The node passes all records in their order before it
    /// serves the store. The store's memory is new. It may have the effects of a record already, since a checkpoint
    /// may contain the effects of records that follow it.
    ///
    /// The inner error says why the record is invalid. Records passed the checksum of the log.
    fn replay(&self, _context: Context<'_, M>, _record: &[u8]) -> Result<Result<(), String>, M::Wait> {
        Ok(Err("stores of this kind have no log".into()))
    }

    /// Ends the replay: the node has passed all records. A record may have found no space because others had not been
    /// passed yet, and the service has kept it until now. Returns the number of entries for which there is no space.
    ///
    /// A log may lack what had replaced an entry, if it is not synced before each answer. Only then may entries take
    /// more space than the store has. They are dropped.
    fn replayed(&self, _context: Context<'_, M>) -> Result<u64, M::Wait> {
        Ok(0)
    }

    /// Checks that [`Service::replay`] would accept a record, without an access to memory. The node checks all records
    /// before it discards a memory for its log.
    ///
    /// # Errors
    /// The record is invalid, for this reason.
    fn check(&self, _record: &[u8]) -> Result<(), String> {
        Ok(())
    }

    /// Compares a record of the log with memory that was kept, and remembers the record if memory has neither its
    /// effect nor that of a later record in its place. Such a call was never answered: its node died, or its log
    /// failed, before [`Service::finish`]. The node passes all records in their order before it serves the store.
    fn compare(&self, _memory: &M, _record: &[u8]) -> Result<(), M::Wait> {
        Ok(())
    }

    /// Takes back the records that [`Service::compare`] remembers: adds records after which a replay gives what memory
    /// has. Later records may need the space that the replay would give to the former ones. Returns whether there are
    /// more; a step adds about a MiB at most. The node writes them to the log before the log takes any other.
    fn take_back(&self, _memory: &M, _records: &mut Records) -> Result<bool, M::Wait> {
        Ok(false)
    }

    /// Continues a checkpoint of the structure from `cursor` (initially 0), in at most about 16 accesses. Adds records
    /// that recreate the contents of the structure's next part. Returns the next cursor, or `None` at the end.
    ///
    /// Calls run in between. So the records together have every entry that existed all the time, and of an entry that
    /// was changed in between a state that it had. The log then has the records of these changes, too.
    fn checkpoint(&self, _memory: &M, _cursor: u64, _records: &mut Records) -> Result<Option<u64>, M::Wait> {
        Ok(None)
    }

    /// The locks that a piece of work needs. It is a function of `work` alone. By default, all work takes the same
    /// lock.
    ///
    /// Locks exclude only the service's own work. Clients' chains run at any time.
    fn locks(&self, _work: Work<'_>) -> Locks {
        Locks::ONE
    }

    /// Continues the search for buffers that the structure reaches, from `cursor` (initially 0), in at most about 16
    /// accesses. Adds the addresses of these buffers to `found`. Returns the next cursor, or `None` at the end.
    fn live(&self, memory: &M, cursor: u64, found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait>;

    /// Performs one step of the structure's background work, in at most about 16 accesses. The service may change its
    /// own state only after the step's last access. The node calls it at intervals, one store after another, and at the
    /// time that the last step has asked for.
    fn tick(&self, _context: Context<'_, M>) -> Result<Tick, M::Wait> {
        Ok(Tick::Idle)
    }

    /// Continues to rebuild the service's private state from the table, from `cursor` (initially 0), in at most about
    /// 16 accesses. Returns the next cursor, or `None` at the end. The service changes its own state only after the
    /// last access of a step.
    ///
    /// A node that takes over a memory runs this for each store that it finds there, to the end, before it serves any
    /// chain, call, step or record of a log. A store that is new, or that is created again from its log, has no state
    /// to rebuild. Nor does it keep private state when the store gets another table ([`Service::rebuild`]).
    ///
    /// The inner error says why the table is invalid. The node then does not start.
    fn recover(&self, _memory: &M, _cursor: u64) -> Result<Result<Option<u64>, String>, M::Wait> {
        Ok(Ok(None))
    }

    /// Releases what the service keeps for sessions that have ended, such as reserved space. Makes no access to memory.
    /// The node calls it in the guard of a step of [`Service::tick`], after that step, if a session has ended since the
    /// last time. A service that must release something soon asks for a step in time ([`Tick::At`]).
    ///
    /// `gone` says whether the session with this number has ended: no chain of it, no call of it and no second part of
    /// such a call runs any more, nor will one. What was true once stays true. A session that a process of this
    /// memory's earlier node opened has ended, too.
    fn sessions_ended(&self, _gone: &dyn Fn(u32) -> bool) {}

    /// The table of leases of a store whose clients follow a pointer in a later chain than the one that has read it. It
    /// lies within the store's table. The node then reuses a buffer only once no operation of a holder of an id can
    /// reach it ([`crate::leases`]). The result is the same in every call.
    fn leases(&self) -> Option<LeaseTable> {
        None
    }

    /// Numbers for the operator, each with its name in the style of `pool_live_bytes`. Makes no access to memory, and
    /// is called at any time. The numbers of a store's members are added up, so each is an amount and not a share.
    fn report(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// The interface for giving the store another table, or `None` if the service has no such interface. The node uses
    /// it only while no call or step of the service runs.
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
    /// The step found nothing to do until this time of the node's clock ([`Context::now`]), unless the store changes.
    At(Duration),
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

    /// Whether stores of this kind have logs, if the node has a folder for them.
    fn is_logged(&self) -> bool {
        false
    }

    /// Whether sessions may reuse the buffers that they retire in stores of this kind, without the node. If so, the
    /// service follows pointers to buffers only in turns, in scans and in rebuilds.
    fn permits_reuse(&self) -> bool {
        false
    }

    /// Whether stores of this kind lie in their tables alone. Such a store has no buffers and no reserve, so no chain
    /// can ALLOCATE in it. Its quota only limits its table: [`Kind::plan`] returns the size of a table that uses it.
    fn is_table_only(&self) -> bool {
        false
    }

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
