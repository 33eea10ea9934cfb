//! Stores whose clients read with one-sided READs and change with calls: the bytes of the calls, the client's half and
//! the service's half of them, and the way of a get whose READs return torn bytes or take too long.
//!
//! ```text
//! request  | op u8 | 0 u8 | key length u16 | key | value |             of a call to the service, after its address
//! answer   | outcome u8 | 0 u8 x 3 | generation u32 | value |
//! ```
//!
//! All numbers are little-endian. A version is the number of an install (a put or delete) in the store, modulo 2^31.

use super::{Fetched, KEY_MAX, KvError, Version, check_key};
use crate::ready::pauses;
use farside_remote::clock::Clock;
use farside_remote::fabric::{CALL_BYTES_MAX, Ran};
use farside_remote::service::{ADDRESS_SIZE, Call, Context, Service, address};
use farside_remote::{Fabric, FabricError, Key, Memory, NodeId, Rights};
use std::sync::atomic::{AtomicBool, Ordering};

/// Number of attempts after which a get calls the service. An attempt fails if it reads torn bytes, if a chain changes
/// under it, or if a READ is slow.
pub const ATTEMPTS_MAX: u32 = 16;
/// Number of READs of a get that take too long for their bytes to be trusted, before it calls the service.
pub const SLOW_MAX: u32 = 2;
/// Largest length of a key and its value together, in bytes, in a store of any kind.
pub const PAIR_MAX: usize = 60 * 1024 - 16;
const _: () = assert!(ADDRESS_SIZE + REQUEST_SIZE + PAIR_MAX <= CALL_BYTES_MAX);
const _: () = assert!(ANSWER_SIZE + PAIR_MAX <= CALL_BYTES_MAX);

/// Reason and remedy in the error about a full table.
const NO_GROWTH: &str = "tables of this kind do not grow: create the store for more items (--items)";
const GENERATION_MASK: u64 = (1 << 31) - 1;

/// The calls of one client to the service of its store.
pub(crate) struct Calls {
    node: NodeId,
    key: Key,
    pair_max: usize,
    /// What a service of this kind reports as [`Outcome::Damaged`].
    damaged: &'static str,
    request: Vec<u8>,
    answer: Vec<u8>,
}

impl Calls {
    /// Creates the calls to the service of the store that `key` opens at `node`. A key and its value have at most
    /// `pair_max` bytes together.
    pub(crate) fn new(node: NodeId, key: Key, pair_max: usize, damaged: &'static str) -> Calls {
        Calls { node, key, pair_max, damaged, request: Vec::new(), answer: Vec::new() }
    }

    /// Stores a value by one call.
    pub(crate) async fn put<F: Fabric + Clock>(
        &mut self,
        fabric: &F,
        key: &[u8],
        value: &[u8],
    ) -> Result<(), KvError> {
        check_key(key)?;
        let (len, max) = (key.len() + value.len(), self.pair_max);
        if len > max {
            return Err(KvError::PairLength { len, max });
        }
        let request = Request { op: Op::Put, key, value };
        let mut outcome = self.call(fabric, &request).await.map_err(KvError::of_install)?;
        if outcome == Some(Outcome::OutOfMemory) {
            outcome = self.call_until_ready(fabric, &request).await?;
        }
        match outcome {
            Some(Outcome::Done) => Ok(()),
            Some(Outcome::OutOfMemory) => Err(KvError::OutOfMemory),
            Some(Outcome::TableFull) => Err(KvError::TableFull(NO_GROWTH.into())),
            Some(Outcome::Damaged) => Err(KvError::Damaged(self.damaged)),
            _ => Err(self.unknown_answer()),
        }
    }

    /// Deletes a key by one call.
    pub(crate) async fn delete<F: Fabric + Clock>(
        &mut self,
        fabric: &F,
        key: &[u8],
    ) -> Result<bool, KvError> {
        check_key(key)?;
        let request = Request { op: Op::Delete, key, value: &[] };
        match self.call(fabric, &request).await.map_err(KvError::of_install)? {
            Some(Outcome::Done) => Ok(true),
            Some(Outcome::Absent) => Ok(false),
            Some(Outcome::Damaged) => Err(KvError::Damaged(self.damaged)),
            _ => Err(self.unknown_answer()),
        }
    }

    /// Reads the value by a call to the service, for a get whose attempts have failed. The service runs one call at a
    /// time, so no put interferes, and the time that the call takes does not matter.
    #[cold]
    pub(crate) async fn get<F: Fabric + Clock>(
        &mut self,
        fabric: &F,
        key: &[u8],
    ) -> Result<Option<Fetched>, KvError> {
        match self.call(fabric, &Request { op: Op::Get, key, value: &[] }).await.map_err(KvError::of_read)? {
            Some(Outcome::Done) => {
                let version = Answer::decode(&self.answer).map_or(Version(0), |answer| answer.version);
                Ok(Some(Fetched { at: None, version }))
            }
            Some(Outcome::Absent) => Ok(None),
            Some(Outcome::Damaged) => Err(KvError::Damaged(self.damaged)),
            _ => Err(self.unknown_answer()),
        }
    }

    /// The value that the last get has read by a call.
    pub(crate) fn value(&self) -> &[u8] {
        Answer::decode(&self.answer).map_or(&[][..], |answer| answer.value)
    }

    /// Calls the service. Returns `None` if the answer cannot be decoded.
    async fn call<F: Fabric + Clock>(
        &mut self,
        fabric: &F,
        request: &Request<'_>,
    ) -> Result<Option<Outcome>, FabricError> {
        let service = address(self.key, &mut self.request);
        request.encode(&mut self.request);
        fabric.call(self.node, service, &self.request, &mut self.answer).await?;
        Ok(Answer::decode(&self.answer).map(|answer| answer.outcome))
    }

    fn unknown_answer(&self) -> KvError {
        KvError::Fabric(FabricError::Lost {
            node: self.node,
            ran: Ran::Unknown,
            reason: "the store's answer is unknown to this release: use the same release on both sides"
                .into(),
        })
    }

    /// Retries a put while memory may still become free, from deleted items of other sizes.
    #[cold]
    async fn call_until_ready<F: Fabric + Clock>(
        &mut self,
        fabric: &F,
        request: &Request<'_>,
    ) -> Result<Option<Outcome>, KvError> {
        let mut outcome = Some(Outcome::OutOfMemory);
        for pause in pauses() {
            fabric.sleep(pause).await;
            outcome = self.call(fabric, request).await.map_err(KvError::of_install)?;
            if outcome != Some(Outcome::OutOfMemory) {
                break;
            }
        }
        Ok(outcome)
    }
}

/// What the service of a store does for its calls. `scratch` is empty at the start.
pub(crate) trait Operations: Send + Sync {
    /// Kind of the store.
    const KIND: &'static str;

    /// Completes the change that an earlier node left unfinished. Precedes the first operation.
    fn repair<M: Memory>(&self, memory: &M) -> Result<(), M::Wait>;

    /// Reads the value of a key into `scratch`.
    fn get<M: Memory>(&self, memory: &M, key: &[u8], scratch: &mut Vec<u8>) -> Carried<M>;

    /// Stores a value for a key.
    fn put<M: Memory>(&self, memory: &M, key: &[u8], value: &[u8], scratch: &mut Vec<u8>) -> Carried<M>;

    /// Deletes a key.
    fn delete<M: Memory>(&self, memory: &M, key: &[u8], scratch: &mut Vec<u8>) -> Carried<M>;

    /// As [`Service::live`]. By default, all of the store lies in its table.
    fn live<M: Memory>(
        &self,
        _memory: &M,
        _cursor: u64,
        _found: &mut Vec<u64>,
    ) -> Result<Option<u64>, M::Wait> {
        Ok(None)
    }
}

/// Result of an operation, which memory may delay.
pub(crate) type Carried<M> = Result<(Outcome, Version), <M as Memory>::Wait>;

/// A service that runs one call at a time: calls change the table in place.
pub(crate) struct OneByOne<O> {
    operations: O,
    /// Whether the change that an earlier node left unfinished has been completed.
    is_repaired: AtomicBool,
}

impl<O> OneByOne<O> {
    pub(crate) fn new(operations: O) -> OneByOne<O> {
        OneByOne { operations, is_repaired: AtomicBool::new(false) }
    }
}

impl<O: Operations, M: Memory> Service<M> for OneByOne<O> {
    fn call(
        &self,
        context: Context<'_, M>,
        call: Call<'_>,
        answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        let Request { op, key, value } = match Request::decode(call.request) {
            Ok(request) => request,
            Err(wrong) => return Ok(Err(wrong)),
        };
        if let Some(refusal) = refusal(O::KIND, op, call.rights) {
            return Ok(Err(refusal));
        }
        let Context { memory, scratch, .. } = context;
        // The store's lock orders the accesses to the flag.
        if !self.is_repaired.load(Ordering::Relaxed) {
            self.operations.repair(memory)?;
        }
        let (outcome, version) = match op {
            Op::Get => self.operations.get(memory, key, scratch)?,
            Op::Put => self.operations.put(memory, key, value, scratch)?,
            Op::Delete => self.operations.delete(memory, key, scratch)?,
        };
        self.is_repaired.store(true, Ordering::Relaxed);
        let is_read = (op, outcome) == (Op::Get, Outcome::Done);
        let value = if is_read { &scratch[..] } else { &[] };
        Answer { outcome, version, value }.encode(answer);
        Ok(Ok(()))
    }

    fn live(&self, memory: &M, cursor: u64, found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        self.operations.live(memory, cursor, found)
    }
}

/// Returns the refusal of a request without the rights that it needs, if it lacks them.
fn refusal(kind: &str, op: Op, rights: Rights) -> Option<String> {
    let (needed, word) = if op == Op::Get { (Rights::READ, "read") } else { (Rights::WRITE, "write") };
    (!rights.contains(needed)).then(|| {
        format!(
            "this operation on a {kind} store needs the right '{word}', which your token lacks: ask the operator of \
             the node"
        )
    })
}

/// Operation that a request asks the service to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// Reads the value of a key, for a client of which [`ATTEMPTS_MAX`] attempts have failed, or [`SLOW_MAX`] READs
    /// were slow.
    Get = 1,
    /// Stores a value for a key.
    Put = 2,
    /// Deletes a key.
    Delete = 3,
}

/// A decoded request to the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Operation that the service must run.
    pub op: Op,
    /// Key of the operation.
    pub key: &'a [u8],
    /// New value of a put; otherwise empty.
    pub value: &'a [u8],
}

/// Number of bytes of a request before its key.
pub const REQUEST_SIZE: usize = 4;

impl<'a> Request<'a> {
    /// Appends the encoded request to `bytes`.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        let [low, high] = (self.key.len() as u16).to_le_bytes();
        bytes.extend_from_slice(&[self.op as u8, 0, low, high]);
        bytes.extend_from_slice(self.key);
        bytes.extend_from_slice(self.value);
    }

    /// Decodes a request that a peer sent.
    ///
    /// # Errors
    /// This release does not support the request.
    pub fn decode(bytes: &'a [u8]) -> Result<Request<'a>, String> {
        let wrong =
            |what: &str| Err(format!("the request to the store {what}: use the same release on both sides"));
        let Some((&[op, reserved, low, high], rest)) = bytes.split_first_chunk::<REQUEST_SIZE>() else {
            return wrong("is shorter than its header");
        };
        let op = match op {
            1 => Op::Get,
            2 => Op::Put,
            3 => Op::Delete,
            _ => return wrong("has an unknown operation"),
        };
        let Some((key, value)) = rest.split_at_checked(u16::from_le_bytes([low, high]).into()) else {
            return wrong("is shorter than its key");
        };
        if reserved != 0 || (op != Op::Put && !value.is_empty()) {
            return wrong("has unexpected bytes");
        }
        if !(1..=KEY_MAX).contains(&key.len()) || key.len() + value.len() > PAIR_MAX {
            return wrong("has a key or a value of an invalid length");
        }
        Ok(Request { op, key, value })
    }
}

/// Outcome of a request to the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Outcome {
    /// The operation was carried out; the key has a value, or had one before a delete.
    Done = 0,
    /// The key has no value. Nothing was changed.
    Absent = 1,
    /// No buffer is free. Nothing was changed.
    OutOfMemory = 2,
    /// All slots on the key's probe path belong to other keys. Nothing was changed.
    TableFull = 3,
    /// The key may be in a damaged entry. Nothing was changed.
    Damaged = 4,
}

/// Number of bytes of an answer before the value.
pub const ANSWER_SIZE: usize = 8;

/// Answer of the service to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer<'a> {
    /// Outcome of the request.
    pub outcome: Outcome,
    /// Version of the value that a get returns, or of the install of a put or delete.
    pub version: Version,
    /// Value that a get returns; otherwise empty.
    pub value: &'a [u8],
}

impl<'a> Answer<'a> {
    /// Appends the encoded answer to `bytes`.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&[self.outcome as u8, 0, 0, 0]);
        bytes.extend_from_slice(&self.version.0.to_le_bytes());
        bytes.extend_from_slice(self.value);
    }

    /// Decodes an answer; `None` if its outcome is unknown.
    pub fn decode(bytes: &'a [u8]) -> Option<Answer<'a>> {
        let (&[outcome, _, _, _, v0, v1, v2, v3], value) = bytes.split_first_chunk::<ANSWER_SIZE>()?;
        let outcome = match outcome {
            0 => Outcome::Done,
            1 => Outcome::Absent,
            2 => Outcome::OutOfMemory,
            3 => Outcome::TableFull,
            4 => Outcome::Damaged,
            _ => return None,
        };
        Some(Answer { outcome, version: Version(u32::from_le_bytes([v0, v1, v2, v3])), value })
    }
}

/// Returns the version of the items that install number `installs` wrote.
pub fn version_of(installs: u64) -> Version {
    Version((installs & GENERATION_MASK) as u32)
}
