//! The ops of each phase of a transaction, in the order of their chains.
//!
//! A phase has stages; a stage has threads, which run in parallel; a thread is a list of ops. In prepare and commit, a
//! thread is the chain to one shard.

use super::rules::{
    BackOut, Clear, Close, Decided, Install, Intent, Prepare, Raise, Scan, Snapshot, WriteCheck,
};
use super::world::{KEYS, SHARDS, World};

/// An op: on a key, or on the entries of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Begins, as the next holder of an id.
    Begin,
    /// Reads slot and value of a key at once.
    Read(usize),
    /// Reads the slot of a key.
    ReadSlot(usize),
    /// Reads the value of a key.
    ReadValue(usize),
    /// Reads a key without a prepare, once it is settled.
    ReadSettled(usize),
    /// Writes the body of the intent.
    WriteBody(usize),
    /// Sets the entry to ACTIVE.
    Activate(usize),
    /// Checks a read.
    CheckRead(usize),
    /// Checks a write.
    CheckWrite(usize),
    /// Checks PR before PW is raised.
    CheckReaders(usize),
    /// Raises PW without a check of PR.
    RaiseWrite(usize),
    /// Sets the entry to DECIDED.
    Decide(usize),
    /// Installs the value of a key.
    Install(usize),
    /// Installs C alone.
    InstallVersion(usize),
    /// Installs the address alone.
    InstallValue(usize),
    /// Waits until the replaced PW is settled.
    AwaitReplaced(usize),
    /// Raises C of a key, in an abort.
    Raise(usize),
    /// Frees the entry.
    Free(usize),
    /// Reads the own entry at the shard of a key, after a chain without a response.
    FindOwn(usize),
    /// Fences the client at a shard.
    Fence(usize),
    /// Reads the client's entries at a shard.
    ReadLog(usize),
    /// Both at once: equal to one after the other if the client has one recoverer.
    FenceAndReadLog(usize),
    /// Reads the lease of the client's id.
    ConfirmLease,
    /// Reads the slot of a key, to skip the key if nothing is to do.
    Look(usize),
    /// Waits for the transaction of an entry (second field) that writes a key, if its timestamp is smaller.
    Await(usize, usize),
    /// The first half of `Await`, if the entry is reused: reads the word.
    AwaitWord(usize, usize),
    /// The second half: reads the body, and the word again.
    AwaitBody(usize, usize),
    /// Repeats the install of a key.
    Redo(usize),
    /// Raises C of a key, in a recoverer's abort.
    BackOut(usize),
    /// Closes an entry that is settled.
    Close(usize),
}

impl Op {
    /// Returns the shard of the memory that the op accesses, if any.
    pub(super) fn shard(self, world: &World) -> Option<usize> {
        match self {
            Op::Begin | Op::ConfirmLease => None,
            Op::WriteBody(shard)
            | Op::Activate(shard)
            | Op::Decide(shard)
            | Op::Free(shard)
            | Op::Fence(shard)
            | Op::ReadLog(shard)
            | Op::FenceAndReadLog(shard)
            | Op::Close(shard) => Some(shard),
            Op::Read(key)
            | Op::ReadSlot(key)
            | Op::ReadValue(key)
            | Op::ReadSettled(key)
            | Op::CheckRead(key)
            | Op::CheckWrite(key)
            | Op::CheckReaders(key)
            | Op::RaiseWrite(key)
            | Op::Install(key)
            | Op::InstallVersion(key)
            | Op::InstallValue(key)
            | Op::AwaitReplaced(key)
            | Op::Raise(key)
            | Op::FindOwn(key)
            | Op::Look(key)
            | Op::Await(key, _)
            | Op::AwaitWord(key, _)
            | Op::AwaitBody(key, _)
            | Op::Redo(key)
            | Op::BackOut(key) => Some(world.shards[key]),
        }
    }
}

/// Threads of a stage.
pub type Stage = [Vec<Op>; SHARDS];

/// The ops of a transaction, and of those who recover it.
#[derive(Clone, Debug)]
pub struct Program {
    /// Execution: one thread.
    pub execute: Vec<Op>,
    /// Prepare, by stage and shard.
    pub prepare: Vec<Stage>,
    /// Commit, by stage and shard.
    pub commit: Vec<Stage>,
    /// The client's abort, by key.
    pub abort: [Vec<Op>; KEYS],
    /// The client's abort at a shard whose prepare has no response, by key.
    pub abort_unknown: [Vec<Op>; KEYS],
    /// A recoverer's commit, by shard.
    pub redo: Stage,
    /// A recoverer's abort, by key.
    pub back_out: [Vec<Op>; KEYS],
    /// The shards that the transaction writes.
    pub written: Vec<usize>,
}

impl Program {
    /// Returns the ops of the transaction with this number.
    pub(super) fn new(world: &World, number: u8) -> Program {
        let transaction = world.transaction(number);
        let mut written: Vec<usize> = transaction.writes.iter().map(|key| world.shards[*key]).collect();
        written.sort_unstable();
        written.dedup();
        let back_out: [Vec<Op>; KEYS] = std::array::from_fn(|key| back_out(world, number, key));
        Program {
            execute: execute(world, number),
            prepare: prepare(world, number, &written),
            commit: commit(world, number, &written),
            abort: std::array::from_fn(|key| abort(world, number, key)),
            abort_unknown: std::array::from_fn(|key| {
                let mut ops = back_out[key].clone();
                ops.insert(0, Op::FindOwn(key));
                ops
            }),
            redo: std::array::from_fn(|shard| redo(world, number, shard)),
            back_out,
            written,
        }
    }
}

/// Returns the keys at a shard that a transaction writes.
fn written_at(world: &World, number: u8, shard: usize) -> impl Iterator<Item = usize> {
    let writes = &world.transaction(number).writes;
    (0..KEYS).filter(move |key| writes.contains(key) && world.shards[*key] == shard)
}

fn execute(world: &World, number: u8) -> Vec<Op> {
    let transaction = world.transaction(number);
    let lane = world.lane_of(number);
    let is_next_holder = world.lanes[lane].succeeds.is_some() && world.first_of[lane] == number;
    let mut ops = if is_next_holder { vec![Op::Begin] } else { Vec::new() };
    ops.extend(transaction.reads.iter().flat_map(|&key| match world.rules.snapshot {
        _ if transaction.is_single_reads => vec![Op::ReadSettled(key)],
        Snapshot::Whole => vec![Op::Read(key)],
        Snapshot::SlotFirst => vec![Op::ReadSlot(key), Op::ReadValue(key)],
        Snapshot::ValueFirst => vec![Op::ReadValue(key), Op::ReadSlot(key)],
    }));
    ops
}

/// Prepare: for each shard, `[append intent ACTIVE; read and write CASes]`.
fn prepare(world: &World, number: u8, written: &[usize]) -> Vec<Stage> {
    let transaction = world.transaction(number);
    if transaction.is_single_reads {
        return Vec::new();
    }
    let chain = |shard: usize, reads: bool, writes: bool| -> Vec<Op> {
        let mut checks = Vec::new();
        for key in (0..world.shards.len()).filter(|key| world.shards[*key] == shard) {
            if reads && transaction.reads.contains(&key) {
                checks.push(Op::CheckRead(key));
            }
            if writes && transaction.writes.contains(&key) {
                match world.rules.write_check {
                    WriteCheck::AfterRaise | WriteCheck::Strictly => checks.push(Op::CheckWrite(key)),
                    WriteCheck::BeforeRaise => checks.extend([Op::CheckReaders(key), Op::RaiseWrite(key)]),
                }
            }
        }
        let intent = match writes && written.contains(&shard) {
            true => vec![Op::WriteBody(shard), Op::Activate(shard)],
            false => Vec::new(),
        };
        match world.rules.intent {
            Intent::BeforeWrites => [intent, checks].concat(),
            Intent::AfterWrites => [checks, intent].concat(),
        }
    };
    match world.rules.prepare {
        Prepare::Together => vec![std::array::from_fn(|shard| chain(shard, true, true))],
        Prepare::ReadsFirst => vec![
            std::array::from_fn(|shard| chain(shard, true, false)),
            std::array::from_fn(|shard| chain(shard, false, true)),
        ],
    }
}

/// Commit: for each written shard, `[state := DECIDED in this shard's own entry; installs]`.
fn commit(world: &World, number: u8, written: &[usize]) -> Vec<Stage> {
    let chain = |shard: usize, decides: bool| -> Vec<Op> {
        if !written.contains(&shard) {
            return Vec::new();
        }
        let installs = written_at(world, number, shard).flat_map(|key| match world.rules.install {
            Install::AsOne => vec![Op::Install(key)],
            Install::VersionFirst => vec![Op::InstallVersion(key), Op::InstallValue(key)],
            Install::ValueFirst => vec![Op::InstallValue(key), Op::InstallVersion(key)],
        });
        let mut ops: Vec<Op> = installs.collect();
        if decides {
            let at = if world.rules.decided == Decided::AfterInstalls { ops.len() } else { 0 };
            ops.insert(at, Op::Decide(shard));
        }
        if world.rules.clear == Clear::PerShard {
            ops.push(Op::Free(shard));
        }
        ops
    };
    let home = written.first().copied();
    match world.rules.decided {
        Decided::AtEveryShard | Decided::AfterInstalls => {
            vec![std::array::from_fn(|shard| chain(shard, true))]
        }
        Decided::Never => vec![std::array::from_fn(|shard| chain(shard, false))],
        Decided::AtHomeBesideInstalls => {
            vec![std::array::from_fn(|shard| chain(shard, Some(shard) == home))]
        }
        Decided::AtHomeFirst => {
            let at = |shard, is_home: bool| match (Some(shard) == home) == is_home {
                true => chain(shard, is_home),
                false => Vec::new(),
            };
            vec![std::array::from_fn(|shard| at(shard, true)), std::array::from_fn(|shard| at(shard, false))]
        }
    }
}

/// Abort of a key whose PW the transaction has raised: wait for C >= the replaced PW, then raise C.
fn abort(world: &World, number: u8, key: usize) -> Vec<Op> {
    match world.rules.raise {
        _ if !world.transaction(number).writes.contains(&key) => Vec::new(),
        Raise::Ordered | Raise::OrderedIfEqual => vec![Op::AwaitReplaced(key), Op::Raise(key)],
        Raise::AtOnce => vec![Op::Raise(key)],
        Raise::Never => Vec::new(),
    }
}

/// Commit by a recoverer: the installs of a shard.
fn redo(world: &World, number: u8, shard: usize) -> Vec<Op> {
    let mut ops: Vec<Op> = written_at(world, number, shard).map(Op::Redo).collect();
    if matches!(world.rules.close, Close::DonePerShard | Close::ErasedPerShard) && !ops.is_empty() {
        ops.push(Op::Close(shard));
    }
    ops
}

/// Abort by a recoverer, per key in this order: read the slot, and skip the key if PW < TS or C >= TS; wait for every
/// other entry of the shard's log that names the key and has a smaller timestamp; raise C.
fn back_out(world: &World, number: u8, key: usize) -> Vec<Op> {
    if !world.transaction(number).writes.contains(&key) {
        return Vec::new();
    }
    let own = world.entry_of[world.lane_of(number)];
    let writes_key = |entry: &usize| {
        world.sharing_entry(*entry).any(|other| world.transaction(other).writes.contains(&key))
    };
    let others = (0..world.lanes.len()).filter(|entry| *entry != own).filter(writes_key);
    let wait: Vec<Op> = others
        .flat_map(|entry| match (world.sharing_entry(entry).count(), world.rules.scan) {
            (1, _) => vec![Op::Await(key, entry)],
            (_, Scan::WordFirst) => vec![Op::AwaitWord(key, entry), Op::AwaitBody(key, entry)],
            (_, Scan::BodyFirst) => vec![Op::AwaitBody(key, entry), Op::AwaitWord(key, entry)],
        })
        .collect();
    let (look, raise) = (vec![Op::Look(key)], vec![Op::BackOut(key)]);
    match world.rules.back_out {
        BackOut::LookWaitRaise | BackOut::OnlyOwnPrepare => [look, wait, raise].concat(),
        BackOut::NoWait => [look, raise].concat(),
        BackOut::NoLook => [wait, raise].concat(),
        BackOut::WaitFirst => [wait, look, raise].concat(),
        BackOut::Never => Vec::new(),
    }
}
