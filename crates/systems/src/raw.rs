//! Plain memory under a key, for micro-benchmarks and tests that measure one op, one chain or one call.
//!
//! No paper describes this system. Its operations are the ones that papers time separately (PRISM, figure 1). Each
//! operation is one chain or one call. The node's CPU answers a call with the bytes of the request. The memory has no
//! access control inside: every client with the region's key may write everywhere.
//!
//! ```text
//! table | slot 16 bytes | x 64 | plain memory, to the end |
//! slot  | a bounded pointer: address u64, bound u32, tag u32 |    all zero while it has no buffer
//! ```
//!
//! Invariant: no two slots point to the same buffer.
//! Invariant: a slot has one writer at a time, and this writer knows the slot's content. If another client has changed
//! the slot, the writer's put fails and changes nothing.

use crate::ready::run_until_ready;
use crate::store::{self, Members, StoreError};
use crate::system::{Family, Footprint, Options, Sizing, SizingError, System};
use farside_remote::arena::class::Class;
use farside_remote::clock::Clock;
use farside_remote::fabric::CALL_BYTES_MAX;
use farside_remote::service::{ADDRESS_SIZE, Call, Context, Extent, Kind, Plan, Service, address};
use farside_remote::wire::{CHAIN_BYTES_MAX, ChainHeader, OpHeader, REPLY_BYTES_MAX};
use farside_remote::{
    Addr, BoundedPtr, Capabilities, ChainBuf, Fabric, FabricError, Memory, Mode, NodeId, Reply, Status,
    Width, allocate, cas, cas_from, fetch_add, read, read_as, write,
};
use serde::Deserialize;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Kind of the store in the catalog.
pub const KIND: &str = "raw";
/// Number of slots of a store.
pub const SLOTS: u64 = 64;
/// Smallest quota, in bytes: one segment for the table and one for buffers.
pub const QUOTA_MIN: u64 = 2 << 20;

const SLOT_SIZE: u64 = size_of::<BoundedPtr>() as u64;
const SLOTS_SIZE: u64 = SLOTS * SLOT_SIZE;

const CHAIN: usize = size_of::<ChainHeader>();
const OP: usize = size_of::<OpHeader>();
const ADDR: usize = size_of::<Addr>();
/// Number of bytes of each op in a reply, besides the op's output.
const REPLY_ENTRY: usize = 8;

/// Largest number of bytes that one READ returns.
pub const READ_MAX: usize = REPLY_BYTES_MAX - REPLY_ENTRY;
/// Largest number of bytes that one WRITE carries.
pub const WRITE_MAX: usize = CHAIN_BYTES_MAX - CHAIN - OP;
/// Largest number of bytes that one [`Raw::get`] returns.
pub const GET_MAX: usize = REPLY_BYTES_MAX - 2 * REPLY_ENTRY;
/// Largest number of bytes that one [`Raw::put`] carries in addition to its four ops.
pub const PUT_MAX: usize = CHAIN_BYTES_MAX - CHAIN - (OP + 8) - (OP + ADDR) - (OP + ADDR + 16) - OP;
/// Largest number of bytes that one [`Raw::echo`] sends and returns.
pub const ECHO_MAX: usize = CALL_BYTES_MAX - ADDRESS_SIZE;

/// Client of one store, which runs one operation at a time. The operations take offsets in bytes from the start of
/// plain memory, which follows the slots.
pub struct Raw<F> {
    fabric: F,
    node: NodeId,
    table: Extent,
    chain: ChainBuf,
    reply: Reply,
    request: Vec<u8>,
    answer: Vec<u8>,
}

/// Error of an operation on plain memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RawError {
    /// The node refused an op with this status.
    Refused(Status),
    /// No buffer was free for 100 ms. Nothing was put.
    OutOfMemory,
    /// A slot, or plain memory, holds other bytes than its only writer wrote.
    Conflict(&'static str),
    /// The fabric returned no response.
    Fabric(FabricError),
}

impl<F: Fabric + Clock> Raw<F> {
    /// Opens the store called `name` at `node`.
    ///
    /// # Errors
    /// The store does not exist, it is of another kind, or the node does not respond.
    pub async fn open(fabric: F, node: NodeId, name: &str) -> Result<Raw<F>, StoreError> {
        store::open::<RawKind, F>(fabric, node, name).await
    }

    /// Size of plain memory in bytes.
    pub fn size(&self) -> u64 {
        self.table.len - SLOTS_SIZE
    }

    /// Reads `len` bytes (at most [`READ_MAX`]) at the offset `at` with one READ.
    ///
    /// # Errors
    /// [`RawError`].
    #[inline]
    pub async fn read(&mut self, at: u64, len: u32) -> Result<&[u8], RawError> {
        let target = self.at(at);
        let mut chain = self.chain.begin(self.table.key);
        let out = chain.also(read(target, len));
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        self.reply.get(out).map_err(RawError::Refused)
    }

    /// Writes `bytes` (at most [`WRITE_MAX`]) at the offset `at` with one WRITE. The bytes are written when the
    /// function returns.
    ///
    /// # Errors
    /// [`RawError`].
    ///
    /// # Panics
    /// If `bytes` is longer than [`WRITE_MAX`].
    #[inline]
    pub async fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), RawError> {
        let target = self.at(at);
        let mut chain = self.chain.begin(self.table.key);
        let _ = chain.also(write(target, bytes));
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        done(self.reply.last_status())
    }

    /// Replaces `expected` by `swap` at the offset `at` with one CAS of 8 or 16 bytes. Returns the old value.
    ///
    /// # Errors
    /// [`RawError`].
    #[inline]
    pub async fn cas<T>(&mut self, at: u64, expected: &T, swap: &T) -> Result<T, RawError>
    where
        T: FromBytes + IntoBytes + KnownLayout + Immutable + Unaligned + Copy,
    {
        let target = self.at(at);
        let mut chain = self.chain.begin(self.table.key);
        let old = chain.also(cas(Mode::Eq, target, expected, swap));
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        self.reply.get(old).copied().map_err(RawError::Refused)
    }

    /// Adds `addend` to the 8-byte word at the offset `at` with one FETCH-ADD. Returns the old value.
    ///
    /// # Errors
    /// [`RawError`].
    #[inline]
    pub async fn fetch_add(&mut self, at: u64, addend: u64) -> Result<u64, RawError> {
        let (target, addend) = (self.at(at), U64::new(addend));
        let mut chain = self.chain.begin(self.table.key);
        let old = chain.also(fetch_add(target, &addend));
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        self.reply.get(old).map(|old| old.get()).map_err(RawError::Refused)
    }

    /// Reads up to `len` bytes of the buffer of a slot, with one chain that READs the slot's pointer and then READs
    /// through the pointer.
    ///
    /// # Errors
    /// [`RawError`]; also if the slot has no buffer.
    #[inline]
    pub async fn get(&mut self, slot: u64, len: u32) -> Result<&[u8], RawError> {
        let at = self.slot(slot);
        let mut chain = self.chain.begin(self.table.key);
        let _ = chain.also(read(at, SLOT_SIZE as u32).redirect(POINTER));
        let out = chain.then(read(POINTER, len).indirect().bounded());
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        self.reply.get(out).map_err(RawError::Refused)
    }

    /// Writes `bytes` to a new buffer and swings the slot's pointer from `old` to that buffer, in one chain. The chain
    /// also retires the old buffer. This chain is PRISM-KV's PUT without the probe (PRISM, section 6). Returns the
    /// slot's new pointer.
    ///
    /// # Errors
    /// [`RawError`]. After [`RawError::Fabric`], the bytes may have been put. After any other error, nothing was put.
    ///
    /// # Panics
    /// If `bytes` is longer than [`PUT_MAX`].
    pub async fn put(&mut self, slot: u64, old: BoundedPtr, bytes: &[u8]) -> Result<BoundedPtr, RawError> {
        let at = self.slot(slot);
        let (bound, tag) = (U32::new(bytes.len() as u32), U32::new(old.tag.get().wrapping_add(1)));
        let bound_and_tag = [bound, tag];
        let list =
            Class::for_len(bytes.len()).expect("a chain carries no more bytes than a buffer holds").list();
        let mut chain = self.chain.begin(self.table.key);
        let _ = chain.also(write(POINTER_BOUND, bound_and_tag.as_bytes()));
        let _ = chain.then(allocate(list, [bytes, &[], &[]]).redirect(POINTER));
        let swung = chain.then(cas_from::<BoundedPtr>(at, &old, POINTER).reclaiming(0));
        let fresh = chain.also(read_as::<Addr>(POINTER));
        if !run_until_ready(&self.fabric, self.node, &chain, &mut self.reply).await? {
            return Err(RawError::OutOfMemory);
        }
        match self.reply.status(swung) {
            Status::Ok => {
                let ptr = *self.reply.get(fresh).map_err(RawError::Refused)?;
                Ok(BoundedPtr { ptr, bound, tag })
            }
            Status::CasFailed => {
                Err(RawError::Conflict("a slot holds a pointer that its writer did not write"))
            }
            refused => Err(RawError::Refused(refused)),
        }
    }

    /// Reads a slot's pointer.
    ///
    /// # Errors
    /// [`RawError`].
    pub async fn pointer(&mut self, slot: u64) -> Result<BoundedPtr, RawError> {
        let at = self.slot(slot);
        let mut chain = self.chain.begin(self.table.key);
        let out = chain.also(read_as::<BoundedPtr>(at));
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        self.reply.get(out).copied().map_err(RawError::Refused)
    }

    /// Sends `bytes` to the node's CPU, which sends them back, with one call.
    ///
    /// # Errors
    /// [`RawError`].
    ///
    /// # Panics
    /// If `bytes` is longer than [`ECHO_MAX`].
    pub async fn echo(&mut self, bytes: &[u8]) -> Result<&[u8], RawError> {
        assert!(bytes.len() <= ECHO_MAX, "a call has at most {ECHO_MAX} bytes");
        let service = address(self.table.key, &mut self.request);
        self.request.extend_from_slice(bytes);
        self.fabric.call(self.node, service, &self.request, &mut self.answer).await?;
        Ok(&self.answer)
    }

    fn at(&self, offset: u64) -> Addr {
        Addr::new(self.table.at + SLOTS_SIZE).plus(offset)
    }

    fn slot(&self, slot: u64) -> Addr {
        assert!(slot < SLOTS, "there is no slot {slot}");
        Addr::new(self.table.at + slot * SLOT_SIZE)
    }
}

/// Scratch address of the pointer that a chain follows or creates.
const POINTER: Addr = Addr::scratch(0);
const POINTER_BOUND: Addr = Addr::scratch(8);

fn done(status: Status) -> Result<(), RawError> {
    if status == Status::Ok { Ok(()) } else { Err(RawError::Refused(status)) }
}

impl From<FabricError> for RawError {
    fn from(error: FabricError) -> RawError {
        RawError::Fabric(error)
    }
}

impl std::fmt::Display for RawError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RawError::Refused(status) => write!(
                f,
                "the node refused the operation ({status}): the store may have been dropped, so open it anew; or the \
                 token lacks a right to it, of 'read', 'write', 'atomic' and 'allocate'"
            ),
            RawError::OutOfMemory => f.write_str(
                "the store is out of memory and nothing was put: create one with a larger --quota, or check whether a \
                 stopped process delays reclamation",
            ),
            RawError::Conflict(what) => {
                write!(f, "{what}: another client uses the same store; wait until it is done")
            }
            RawError::Fabric(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for RawError {}

/// Node-side half of plain memory.
pub struct RawKind;

/// Parameters that a store of any kind may be given. Plain memory accepts only their default values.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Parameters {
    items: Option<u64>,
    #[serde(default)]
    placement: Option<String>,
}

impl<M: Memory> Kind<M> for RawKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn plan(&self, parameters: &str, quota: u64, _entropy: u64) -> Result<Plan, String> {
        let parsed: Parameters = serde_json::from_str(parameters)
            .map_err(|error| format!("a {KIND} store takes no parameters ({{}}): {error}"))?;
        if parsed.items.is_some() || parsed.placement.is_some_and(|placement| placement != "hashed") {
            return Err(format!(
                "a {KIND} store is plain memory and has neither items nor slots for keys: omit --items and \
                 --collision-free"
            ));
        }
        if quota < QUOTA_MIN {
            return Err(format!("a {KIND} store needs {} MiB: give a larger --quota", QUOTA_MIN >> 20));
        }
        // Half is plain memory, half holds the buffers of chains that allocate.
        Ok(Plan { table_len: quota / 2, parameters: "{}".into(), wide: false })
    }

    fn serve(&self, _parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        if table.len < SLOTS_SIZE {
            return Err(format!("a {KIND} store has {SLOTS} slots, but its table has {} bytes", table.len));
        }
        Ok(Box::new(Plain { at: table.at }))
    }
}

impl System for RawKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "plain memory";
    const SUMMARY: &'static str = "each operation is one chain or one call";
    const FAMILY: Family = Family::Memory;
    const NEEDS: Capabilities = Capabilities::CALLS.and(Capabilities::CONDITIONAL_OPS);

    type Client<F: Fabric + Clock> = Raw<F>;

    /// The quota alone determines the size of plain memory.
    fn footprint(_sizing: &Sizing) -> Result<Footprint, SizingError> {
        Ok(Footprint { slots: SLOTS, table_bytes: SLOTS_SIZE, item_bytes: 0 })
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(RawKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        _options: &Options,
    ) -> Result<Raw<F>, StoreError> {
        let (node, store) = members.one_of::<Self>(&fabric)?;
        if store.table_len <= SLOTS_SIZE {
            return Err(StoreError::Gone(format!("store '{}' is too small to be {KIND} memory", store.name)));
        }
        Ok(Raw {
            fabric,
            node,
            table: store.extent(),
            chain: ChainBuf::new(),
            reply: Reply::new(),
            request: Vec::new(),
            answer: Vec::new(),
        })
    }
}

struct Plain {
    at: u64,
}

impl<M: Memory> Service<M> for Plain {
    /// Runs any call without a check of rights, because a caller gets back only its own bytes.
    fn call(
        &self,
        _context: Context<'_, M>,
        call: Call<'_>,
        answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        answer.extend_from_slice(call.request);
        Ok(Ok(()))
    }

    fn live(&self, memory: &M, cursor: u64, found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        const PER_STEP: u64 = 16;
        const _: () = assert!(SLOTS.is_multiple_of(PER_STEP));
        for slot in cursor..cursor + PER_STEP {
            let word = memory.load(self.at + slot * SLOT_SIZE, Width::W16)?;
            let pointer = BoundedPtr::read_from_bytes(&word.to_le_bytes()).expect("it has a pointer's size");
            if !pointer.ptr.is_null() {
                found.push(pointer.ptr.raw());
            }
        }
        let next = cursor + PER_STEP;
        Ok((next < SLOTS).then_some(next))
    }
}
