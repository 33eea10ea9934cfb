//! The rules of PRISM-TX as values: those that Farside has decided on, and for each of them the ways to get it wrong.
//!
//! A test explores [`Rules::DECIDED`] with one rule replaced.

/// The rules in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Number of rounds that prepare takes.
    pub prepare: Prepare,
    /// How the execution reads a key.
    pub snapshot: Snapshot,
    /// What the version of a read is.
    pub version: Version,
    /// The check of a write against later readers.
    pub write_check: WriteCheck,
    /// When the intent is in the log.
    pub intent: Intent,
    /// Where and when the client records that it commits.
    pub decided: Decided,
    /// How the committed version and the value change.
    pub install: Install,
    /// When the client reports success.
    pub success: Success,
    /// When a client aborts after a failed check.
    pub failure: Failure,
    /// What an abort waits for before it raises C.
    pub raise: Raise,
    /// For which keys an abort raises C.
    pub raised_keys: RaisedKeys,
    /// When a client clears its entries.
    pub clear: Clear,
    /// When an entry is reused by the client's next transaction.
    pub reuse: Reuse,
    /// What a client does about a prepare without a response.
    pub unknown: Unknown,
    /// How a client chooses the clock of a timestamp.
    pub clock: Clock,
    /// When another client may take over an id.
    pub ids: Ids,
    /// When a recoverer reads the log.
    pub log: Log,
    /// When a recoverer confirms that nobody has recovered its client before.
    pub lease: Lease,
    /// How a recoverer decides.
    pub verdict: Verdict,
    /// How a recoverer repeats an install.
    pub redo: Redo,
    /// How a recoverer aborts.
    pub back_out: BackOut,
    /// How a recoverer reads the entries of other clients.
    pub scan: Scan,
    /// What a recoverer leaves of a DECIDED entry.
    pub close: Close,
    /// How a recoverer changes an entry.
    pub closed_by: ClosedBy,
    /// In which order a recoverer settles the transactions of one client.
    pub order: Order,
    /// Which entries a recoverer takes as those of its client.
    pub found: FoundEntries,
}

impl Rules {
    /// The rules that Farside has decided on.
    pub const DECIDED: Rules = Rules {
        prepare: Prepare::Together,
        snapshot: Snapshot::Whole,
        version: Version::OfSlot,
        write_check: WriteCheck::AfterRaise,
        intent: Intent::BeforeWrites,
        decided: Decided::AtEveryShard,
        install: Install::AsOne,
        success: Success::AfterInstalls,
        failure: Failure::AwaitsAll,
        raise: Raise::Ordered,
        raised_keys: RaisedKeys::Advanced,
        clear: Clear::AfterAllShards,
        reuse: Reuse::AfterClear,
        unknown: Unknown::RecoversItself,
        clock: Clock::AboveReservation,
        ids: Ids::AfterRecovery,
        log: Log::AfterFence,
        lease: Lease::ConfirmedAfterLog,
        verdict: Verdict::AnyDecided,
        redo: Redo::IfNewer,
        back_out: BackOut::LookWaitRaise,
        scan: Scan::WordFirst,
        close: Close::Done,
        closed_by: ClosedBy::CompareAndSwap,
        order: Order::Ascending,
        found: FoundEntries::OfClient,
    };

    /// The published rules of aborts: C is raised at once, for the keys of which all checks succeeded.
    pub const PUBLISHED: Rules =
        Rules { raise: Raise::AtOnce, raised_keys: RaisedKeys::Passed, ..Rules::DECIDED };
}

/// Number of rounds that prepare takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prepare {
    /// One: all checks of a shard in one chain.
    Together,
    /// Two: all reads, then all writes, as in the paper.
    ReadsFirst,
}

/// How the execution reads a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Snapshot {
    /// Slot and value by one chain that follows the slot's address.
    Whole,
    /// By two chains, the slot first. Also right.
    SlotFirst,
    /// Broken: by two chains, the value first.
    ValueFirst,
}

/// What the version of a read is: "RC".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// The slot's C.
    OfSlot,
    /// Broken: the C in the buffer. An abort raises the slot's C only.
    OfBuffer,
}

/// The check of a write against later readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteCheck {
    /// TS >= the PR that the CAS of PW returned.
    AfterRaise,
    /// Broken: TS > PR. The transaction's own read has set PR to TS.
    Strictly,
    /// Broken: PR is checked by an op of its own, before PW is raised.
    BeforeRaise,
}

/// When the intent is in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Before the first PW of the shard is raised.
    BeforeWrites,
    /// Broken: after all checks of the shard.
    AfterWrites,
}

/// Where and when the client records that it commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decided {
    /// In the entry of every written shard, before the installs there.
    AtEveryShard,
    /// Broken: in the entry of the first written shard only. The installs of other shards run beside it.
    AtHomeBesideInstalls,
    /// Broken: there only, and before all installs. (Right if this entry is also freed last: one round trip more.)
    AtHomeFirst,
    /// Broken: in the entry of every written shard, after the installs there.
    AfterInstalls,
    /// Broken: nowhere.
    Never,
}

/// How the committed version and the value change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Install {
    /// By one CAS.
    AsOne,
    /// Broken: C first, then the address.
    VersionFirst,
    /// Broken: the address first, then C.
    ValueFirst,
}

/// When the client reports success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Success {
    /// When all shards have acknowledged the installs.
    AfterInstalls,
    /// Broken: when all checks have succeeded.
    AtDecision,
}

/// When a client aborts after a failed check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Once each chain of the prepare has a response, or its session is over.
    AwaitsAll,
    /// Broken: at once. It drops the requests without a response, whose chains may run later.
    DropsRequests,
}

/// What an abort waits for before it raises C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Raise {
    /// C >= the PW that the transaction replaced. Then it raises C, whatever C is.
    Ordered,
    /// Broken: as `Ordered`, but it raises C only if C is the replaced PW.
    OrderedIfEqual,
    /// Broken, and published: nothing.
    AtOnce,
    /// Broken: it never raises C.
    Never,
}

/// For which keys an abort raises C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RaisedKeys {
    /// Each key of which it has raised PW.
    Advanced,
    /// Broken, and published: each key of which all checks succeeded.
    Passed,
}

/// When a client clears its entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clear {
    /// After all shards are finished.
    AfterAllShards,
    /// Broken: after this shard is finished.
    PerShard,
    /// Broken: before an abort has raised C.
    BeforeRaise,
}

/// When an entry is reused by the client's next transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reuse {
    /// After the clear of the former transaction was acknowledged.
    AfterClear,
    /// Broken: at once. The clear is a CAS on the former transaction's word, and may come later.
    BeforeClearByCas,
    /// Broken: at once. The clear is a WRITE, and may overtake the next intent.
    BeforeClearByWrite,
}

/// What a client does about a chain without a response, once its former session with the shard is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// It reads its own entry at this shard, and aborts there as a recoverer does.
    RecoversItself,
    /// Broken: it takes the chain as one that never ran.
    Forgets,
}

/// How a client chooses the clock of a timestamp, apart from the versions that it has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Above all clocks that the id has had, by whatever holder.
    AboveReservation,
    /// Broken: the local clock.
    Local,
}

/// When another client may take over an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    /// After its holder is fenced and recovered.
    AfterRecovery,
    /// Broken: at once, as after a restart.
    AtOnce,
}

/// When a recoverer reads the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Log {
    /// After it has fenced the client at the shard.
    AfterFence,
    /// Broken: before.
    BeforeFence,
}

/// When a recoverer confirms that its client still holds the lease of its id. The first recoverer that is done releases
/// the lease. Then the next holder of the id may overwrite the entries, so entries that are read later prove nothing: a
/// recoverer might miss DECIDED, or take the body of the next holder for that of its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lease {
    /// After it has read the log at all shards, and before its verdict.
    ConfirmedAfterLog,
    /// Broken: before it reads the log.
    ConfirmedBeforeLog,
    /// Broken: never.
    Unconfirmed,
}

/// How a recoverer decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Commit if any entry is DECIDED or DONE, else abort.
    AnyDecided,
    /// Broken: commit if any slot has a value of the transaction.
    FromSlots,
}

/// How a recoverer repeats an install.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Redo {
    /// If C < TS.
    IfNewer,
    /// Broken: always.
    Always,
}

/// How a recoverer aborts: for each key, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackOut {
    /// Reads the slot, and skips the key if PW < TS or C >= TS; waits for smaller intents; raises C.
    LookWaitRaise,
    /// Broken: waits for nothing.
    NoWait,
    /// Broken: raises C also if PW < TS.
    NoLook,
    /// Broken: raises C only if PW = TS.
    OnlyOwnPrepare,
    /// Broken: waits before it reads the slot.
    WaitFirst,
    /// Broken: never raises C.
    Never,
}

/// How a recoverer reads the entry of another client, which may be reused meanwhile.
///
/// Both are right. An intent to wait for was complete before the recoverer has read the slot: else its transaction
/// finds PW above its timestamp, and prepares nothing. So a word or a body that is newer tells that this intent is
/// settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scan {
    /// Word, then body.
    WordFirst,
    /// Body, then word.
    BodyFirst,
}

/// What a recoverer leaves of a DECIDED entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// DONE, once all shards are redone.
    Done,
    /// DONE, once this shard is redone. Also right.
    DonePerShard,
    /// Broken: nothing, once all shards are redone.
    Erased,
    /// Broken: nothing, once this shard is redone.
    ErasedPerShard,
}

/// How a recoverer changes an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClosedBy {
    /// By CAS on timestamp and state.
    CompareAndSwap,
    /// Broken: by WRITE. The entry may be that of the id's next holder.
    Write,
}

/// In which order a recoverer settles the transactions of one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// By ascending timestamps.
    Ascending,
    /// Broken: by descending timestamps.
    Descending,
}

/// Which entries a recoverer takes as those of its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundEntries {
    /// Those with timestamps below the client's reservation.
    OfClient,
    /// All that lie at the client's id, also those of other holders. Also right, since the lease is confirmed after
    /// they are read; broken without that.
    OfId,
}
