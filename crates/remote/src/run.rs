//! The single definition of each op's meaning, used by every fabric that runs chains in software and by the simulator.
//!
//! Semantics: PRISM, table 1 and section 3. Comments mark the cases that the paper leaves open and that we define.
//! Invariant: every access to [`Memory`] is a function of the chain and of the results so far. Apart from memory, `run`
//! changes only its reply, which it clears first. So a caller can run the chain again from the start, with the results
//! replayed.
//!
//! Differs from the paper (3.2, 6.1): a reclaiming CAS and RETIRE retire buffers in the chain that makes them
//! unreachable, so no client has to receive the outcome and report these buffers (decision 0023).

use crate::address::{Addr, BoundedPtr, SCRATCH_SIZE};
use crate::arena::class::Class;
use crate::arena::lists::{Empty, Supply};
use crate::arena::reuse::Retirees;
use crate::arena::session::SessionId;
use crate::arena::{Arena, header};
use crate::chain::{ChainView, OpView};
use crate::key::Key;
use crate::memory::{Memory, WIDE_ALIGN, Width};
use crate::mutants;
use crate::op::Mode;
use crate::reply::{Reply, Status};
use crate::rights::Rights;
use crate::wire::{ALLOCATES_MAX, Code, OpHeader, flag};
use crate::word::{Wide, Word};
use std::cell::Cell;
use zerocopy::{FromZeros, IntoBytes};

/// The sessions on whose behalf a chain runs: one owns new buffers, one retires buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct By {
    /// Number of the session that sent the chain. It owns the buffers that the chain allocates.
    pub owner: u32,
    /// The session in whose turn the chain runs, and on whose list the chain puts the buffers that it retires. No other
    /// thread runs chains for this session at the same time.
    pub retires: SessionId,
}

impl By {
    /// The [`By`] of a session that runs its own chains: the session owns the new buffers and retires the old ones.
    #[inline(always)]
    pub const fn itself(session: SessionId) -> By {
        By { owner: session.number, retires: session }
    }
}

/// Runs a chain on behalf of the sessions `by`, and stores the outcome in `reply`.
///
/// # Errors
/// An access returned *wait*. The caller must run the chain again once the access's result is recorded.
#[inline(always)]
pub fn run<M: Memory>(memory: &M, by: By, chain: ChainView<'_>, reply: &mut Reply) -> Result<(), M::Wait> {
    reply.begin(chain.len());
    // Fast path for a single READ, the most frequent chain. This path is inlined into the caller and kept apart from
    // `run_ops`, so that it need not share registers with other ops.
    let Some(read) = chain.only_read() else { return run_ops(memory, by, chain, reply) };
    let mut scratch = new_scratch();
    let runner = Runner::new(memory, by, chain.key(), &mut scratch, &mut []);
    let (status, len) = ended(runner.read_out(read, reply))?;
    reply.end_op(1, status, len);
    Ok(())
}

#[inline(never)]
fn run_ops<M: Memory>(memory: &M, by: By, chain: ChainView<'_>, reply: &mut Reply) -> Result<(), M::Wait> {
    if chain.allocates() > 0 {
        return run_allocating(memory, by, chain, reply);
    }
    Runner::new(memory, by, chain.key(), &mut new_scratch(), &mut []).run(&chain, reply)
}

/// Reserves a buffer for every ALLOCATE, runs the chain, and frees the unused buffers.
#[inline(never)]
fn run_allocating<M: Memory>(
    memory: &M,
    by: By,
    chain: ChainView<'_>,
    reply: &mut Reply,
) -> Result<(), M::Wait> {
    let mut reserved = [0; ALLOCATES_MAX];
    let (mut scratch, reserved) = (new_scratch(), &mut reserved[..chain.allocates()]);
    let mut runner = Runner::new(memory, by, chain.key(), &mut scratch, reserved);
    if !runner.reserve(&chain)? {
        // What other sessions keep for themselves may help.
        memory.write(header::NEEDED_AT, &1_u64.to_le_bytes())?;
        for _ in 0..chain.len() {
            reply.end_op(chain.len(), Status::NotReady, 0);
        }
        return Ok(());
    }
    runner.run(&chain, reply)?;
    if !mutants::UNUSED_RESERVATION_IS_KEPT.is_on() {
        runner.give_back_unused()?;
    }
    Ok(())
}

/// Reason why an op ends early.
enum Stop<W> {
    Refused(Status),
    Wait(W),
}

impl<W> From<W> for Stop<W> {
    #[inline]
    fn from(wait: W) -> Self {
        Stop::Wait(wait)
    }
}

type Done<W> = Result<(Status, usize), Stop<W>>;

/// The op's status and the size of its output in the reply, in bytes. A refused op has no output.
#[inline(always)]
fn ended<W>(done: Done<W>) -> Result<(Status, usize), W> {
    match done {
        Ok(done) => Ok(done),
        Err(Stop::Refused(status)) => Ok((status, 0)),
        Err(Stop::Wait(wait)) => Err(wait),
    }
}

type Scratch = [u8; SCRATCH_SIZE as usize];

#[inline(always)]
fn new_scratch() -> Scratch {
    [if mutants::SCRATCH_IS_NOT_ZEROED.is_on() { 0xa5 } else { 0 }; SCRATCH_SIZE as usize]
}

struct Runner<'m, M> {
    memory: &'m M,
    by: By,
    key: Key,
    /// The key's rights, read at the first access and kept for the whole chain.
    rights: Cell<Option<Rights>>,
    /// A reference, not an array in this struct: an indexed array would keep the other fields out of registers.
    scratch: &'m mut Scratch,
    /// Addresses of the buffers reserved before the first op, one per ALLOCATE in order. 0 for an ALLOCATE that will be
    /// refused.
    reserved: &'m mut [u64],
    /// Index in `reserved` of the next ALLOCATE's buffer.
    next_reserved: usize,
    /// Bitmask of the reserved buffers whose ALLOCATE ran.
    allocated: u16,
    /// Bitmask of the allocated buffers that no reclaiming CAS has installed, settled or retired yet.
    undecided: u16,
    /// The buffer that the last successful reclaiming CAS made unreachable; 0 if none.
    unlinked: u64,
}

const _: () = assert!(ALLOCATES_MAX <= u16::BITS as usize);

/// The start of a range in scratch, or in memory that the chain may access.
#[derive(Clone, Copy)]
enum Place {
    Node(u64),
    Scratch(usize),
}

/// Maximum number of bytes that are copied from memory to memory at a time.
const COPY_CHUNK: usize = 512;

impl<'m, M: Memory> Runner<'m, M> {
    #[inline(always)]
    fn new(
        memory: &'m M,
        by: By,
        key: Key,
        scratch: &'m mut Scratch,
        reserved: &'m mut [u64],
    ) -> Runner<'m, M> {
        let rights = Cell::new(None);
        let (next_reserved, allocated, undecided, unlinked) = (0, 0, 0, 0);
        Runner { memory, by, key, rights, scratch, reserved, next_reserved, allocated, undecided, unlinked }
    }

    /// Runs every op in order.
    #[inline]
    fn run(&mut self, chain: &ChainView<'_>, reply: &mut Reply) -> Result<(), M::Wait> {
        let ops = chain.len();
        let (mut successful, mut aborted) = (true, false);
        for op in chain.ops() {
            let (status, len) = if aborted {
                self.skip(&op);
                (Status::Aborted, 0)
            } else if op.has(flag::CONDITIONAL) && !successful {
                self.skip(&op);
                (Status::Skipped, 0)
            } else {
                ended(self.op(&op, reply))?
            };
            reply.end_op(ops, status, len);
            if op.has(flag::RECLAIMING) {
                self.reclaim(status, reply)?;
            }
            successful = status == Status::Ok
                || (mutants::SKIPPED_COUNTS_AS_SUCCESS.is_on() && status == Status::Skipped);
            aborted |= status.aborts();
        }
        Ok(())
    }

    #[inline]
    fn op(&mut self, op: &OpView<'_>, reply: &mut Reply) -> Done<M::Wait> {
        match op.code() {
            Code::Read => self.read(op, reply),
            Code::Write => self.write(op),
            Code::Allocate => self.allocate(op, reply),
            Code::Cas => self.cas(op, reply),
            Code::FetchAdd => self.fetch_add(op, reply),
            Code::Retire => self.retire_listed(op, reply),
        }
    }

    #[inline]
    fn read(&mut self, op: &OpView<'_>, reply: &mut Reply) -> Done<M::Wait> {
        let Some(to) = op.redirect() else { return self.read_out(op.header(), reply) };
        let (place, len) = self.target(op.header(), Rights::READ)?;
        let to = self.whole(to, len, Rights::WRITE)?;
        self.copy(place, to, len as usize)?;
        Ok((Status::Ok, 0))
    }

    /// Runs a READ whose output goes into the reply.
    #[inline(always)]
    fn read_out(&self, op: &OpHeader, reply: &mut Reply) -> Done<M::Wait> {
        let (place, len) = self.target(op, Rights::READ)?;
        let Some(out) = reply.output_space(len as usize) else { return Err(Stop::Refused(Status::TooLong)) };
        self.fetch(place, out)?;
        Ok((Status::Ok, len as usize))
    }

    #[inline(never)]
    fn write(&mut self, op: &OpView<'_>) -> Done<M::Wait> {
        let (place, len) = self.target(op.header(), Rights::WRITE)?;
        if let Some(source) = op.source() {
            let source = self.whole(source, len, Rights::READ)?;
            self.copy(source, place, len as usize)?;
        } else {
            self.store_pieces(place, op.payload(), len as usize)?;
        }
        Ok((Status::Ok, 0))
    }

    #[inline(never)]
    fn allocate(&mut self, op: &OpView<'_>, reply: &mut Reply) -> Done<M::Wait> {
        let slot = self.next_reserved;
        self.next_reserved += 1;
        self.class_for(op)?;
        let out = self.word_output(op, 8, reply)?;
        let buffer = self.reserved[slot];
        assert!(buffer != 0, "a permitted ALLOCATE has a reserved buffer: rights are read once per chain");
        self.allocated |= 1 << slot;
        self.undecided |= 1 << slot;
        self.store_pieces(Place::Node(buffer), op.payload(), op.len() as usize)?;
        self.emit_word(u128::from(buffer), 8, out, Status::Ok, reply)
    }

    #[inline(never)]
    fn cas(&mut self, op: &OpView<'_>, reply: &mut Reply) -> Done<M::Wait> {
        if op.width() > 16 { self.cas_wide(op, reply) } else { self.cas_word::<u128>(op, reply) }
    }

    /// Not inlined, so that the code for wide words does not slow down words that fit into registers.
    #[inline(never)]
    fn cas_wide(&mut self, op: &OpView<'_>, reply: &mut Reply) -> Done<M::Wait> {
        self.cas_word::<Wide>(op, reply)
    }

    #[inline(always)]
    fn cas_word<W: Word>(&mut self, op: &OpView<'_>, reply: &mut Reply) -> Done<M::Wait> {
        let len = u64::from(op.width());
        let place = self.word_target::<W>(op, len)?;
        if W::IS_WIDE && !(self.memory.is_wide() && matches!(place, Place::Node(_))) {
            // Checked after the rights, so that a key without rights gets ACCESS instead.
            return Err(Stop::Refused(Status::Invalid));
        }
        if op.has(flag::RECLAIMING) && !matches!(place, Place::Node(_)) {
            // No other chain can follow a pointer in scratch, so a swap there makes no buffer unreachable. If only the
            // client knows that a buffer is garbage, it uses RETIRE.
            return Err(Stop::Refused(Status::Invalid));
        }
        let source = op.source().map(|source| self.word::<W>(source, len, Rights::READ)).transpose()?;
        let out = self.word_output(op, len, reply)?;

        let mut operands = op.operands();
        let compare = if op.has(flag::COMPARE) { Some(take_word::<W>(&mut operands, len)) } else { None };
        let swap = match source {
            Some(source) => self.load::<W>(source, len)?,
            None => take_word(&mut operands, len),
        };
        let compare = compare.unwrap_or(swap);
        let (compare_mask, swap_mask) = if op.has(flag::MASKED) {
            (take_word(&mut operands, len), take_word(&mut operands, len))
        } else {
            (W::ONES, W::ONES)
        };

        let mode = Mode::from_u8(op.mode());
        let mut old = self.load::<W>(place, len)?;
        let status = loop {
            if !W::holds(mode, len, old.masked(compare_mask), compare.masked(compare_mask)) {
                break Status::CasFailed;
            }
            let new = old.blended(swap, swap_mask);
            match self.exchange(place, len, old, new)? {
                Ok(()) => {
                    if let Some(offset) = op.reclaims() {
                        let (old, new) = (pointer_in(old, offset), pointer_in(new, offset));
                        let stays = old == new && !mutants::UNCHANGED_IS_RECLAIMED.is_on();
                        self.unlinked = if stays { 0 } else { old };
                    }
                    break Status::Ok;
                }
                Err(now) => old = now,
            }
        };
        self.emit_word(old, len, out, status, reply)
    }

    #[inline(never)]
    fn fetch_add(&mut self, op: &OpView<'_>, reply: &mut Reply) -> Done<M::Wait> {
        let place = self.word::<u128>(op.target(), 8, Rights::ATOMIC)?;
        let out = self.word_output(op, 8, reply)?;
        let addend = take_word::<u128>(&mut op.operands(), 8) as u64;
        let mut old = self.load::<u128>(place, 8)?;
        loop {
            let sum = (old as u64).wrapping_add(addend);
            match self.exchange(place, 8, old, u128::from(sum))? {
                Ok(()) => return self.emit_word(old, 8, out, Status::Ok, reply),
                Err(now) => old = now,
            }
        }
    }

    /// Runs a RETIRE: retires the buffers that it names.
    #[inline(never)]
    fn retire_listed(&mut self, op: &OpView<'_>, reply: &mut Reply) -> Done<M::Wait> {
        if !self.may(Rights::ALLOCATE)? {
            return Err(Stop::Refused(Status::Access));
        }
        // At most one piece: a RETIRE's addresses are either all borrowed or all inline.
        for piece in op.payload() {
            for at in piece.chunks_exact(size_of::<Addr>()) {
                self.retire(u64::from_le_bytes(at.try_into().expect("eight bytes")), reply)?;
            }
        }
        Ok((Status::Ok, 0))
    }

    /// The place of an op's output word, checked before the op has any effect. `None` if the output goes into the
    /// reply.
    #[inline]
    fn word_output(
        &self,
        op: &OpView<'_>,
        len: u64,
        reply: &mut Reply,
    ) -> Result<Option<Place>, Stop<M::Wait>> {
        match op.redirect() {
            Some(to) => self.whole(to, len, Rights::WRITE).map(Some),
            None if reply.output_space(len as usize).is_some() => Ok(None),
            None => Err(Stop::Refused(Status::TooLong)),
        }
    }

    #[inline]
    fn emit_word<W: Word>(
        &mut self,
        word: W,
        len: u64,
        to: Option<Place>,
        status: Status,
        reply: &mut Reply,
    ) -> Done<M::Wait> {
        let bytes = word.to_bytes();
        let bytes = &bytes.as_ref()[..len as usize];
        if let Some(to) = to {
            self.store(to, bytes)?;
            return Ok((status, 0));
        }
        reply.output_space(bytes.len()).expect("word_output checked the space").copy_from_slice(bytes);
        Ok((status, bytes.len()))
    }

    // The next functions resolve an op's addresses and check the key's rights. Scratch needs no rights.

    /// The target of a READ or WRITE, and the number of bytes to access. The key must have the rights `asked`.
    #[inline(always)]
    fn target(&self, op: &OpHeader, asked: Rights) -> Result<(Place, u64), Stop<M::Wait>> {
        let len = u64::from(op.len.get());
        if !op.has(flag::TARGET_INDIRECT) {
            return Ok((self.whole(op.target(), len, asked)?, len));
        }
        let (ptr, len) = if op.has(flag::BOUNDED) {
            let word = self.pointer(op.target(), 16)?;
            let mut pointer = BoundedPtr::new_zeroed();
            pointer.as_mut_bytes().copy_from_slice(&word.to_le_bytes());
            (pointer.ptr, len.min(u64::from(pointer.bound.get())))
        } else {
            (Addr::new(self.pointer(op.target(), 8)? as u64), len)
        };
        if len == 0 {
            return Ok((Place::Scratch(0), 0)); // Success, without dereferencing the pointer.
        }
        if ptr.is_null() {
            return Err(Stop::Refused(Status::NullPointer));
        }
        match self.reach(ptr, len, asked)? {
            (Place::Node(_), _) if mutants::POINTEE_IS_NOT_CHECKED.is_on() => {
                Ok((Place::Node(ptr.raw()), len))
            }
            (_, 0) => Err(Stop::Refused(Status::Access)),
            (place, _) if mutants::NO_CLAMP.is_on() => Ok((place, len)),
            (place, reach) => Ok((place, reach)), // Clamped to the end of the pointee's buffer.
        }
    }

    /// The target of a CAS, checked for the rights that the CAS needs.
    #[inline(always)]
    fn word_target<W: Word>(&self, op: &OpView<'_>, len: u64) -> Result<Place, Stop<M::Wait>> {
        let asked = if op.has(flag::RECLAIMING) { Rights::ATOMIC | Rights::ALLOCATE } else { Rights::ATOMIC };
        if !op.has(flag::TARGET_INDIRECT) {
            return self.word::<W>(op.target(), len, asked);
        }
        let ptr = Addr::new(self.pointer(op.target(), 8)? as u64);
        if ptr.is_null() {
            return Err(Stop::Refused(Status::NullPointer));
        }
        self.word::<W>(ptr, len, asked)
    }

    /// Loads the pointer at `at`, which has 8 or 16 bytes.
    #[inline(always)]
    fn pointer(&self, at: Addr, len: u64) -> Result<u128, Stop<M::Wait>> {
        Ok(self.load(self.word::<u128>(at, len, Rights::READ)?, len)?)
    }

    /// Whether the key has the rights `asked`.
    #[inline(always)]
    fn may(&self, asked: Rights) -> Result<bool, M::Wait> {
        let rights = match self.rights.get() {
            Some(rights) => rights,
            None => {
                let rights = self.memory.admits(self.key)?;
                self.rights.set(Some(rights));
                rights
            }
        };
        Ok(rights.contains(asked) || (mutants::ONE_RIGHT_IS_ALL.is_on() && rights != Rights::NONE))
    }

    /// The start of the range at `at`, and how many of its `len` bytes the chain may access. The key must have the
    /// rights `asked`.
    #[inline(always)]
    fn reach(&self, at: Addr, len: u64, asked: Rights) -> Result<(Place, u64), M::Wait> {
        match at.scratch_offset() {
            None if self.may(asked)? => {
                Ok((Place::Node(at.raw()), self.memory.reach(self.key.region(), at.raw(), len)?))
            }
            None => Ok((Place::Node(at.raw()), 0)),
            Some(offset) if offset < SCRATCH_SIZE && mutants::SHARED_SCRATCH.is_on() => {
                Ok((Place::Node(header::UNUSED_AT + offset), len.min(SCRATCH_SIZE - offset)))
            }
            Some(offset) if offset < SCRATCH_SIZE => {
                Ok((Place::Scratch(offset as usize), len.min(SCRATCH_SIZE - offset)))
            }
            Some(_) => Ok((Place::Scratch(0), 0)),
        }
    }

    /// The place of all `len` bytes from `at` on, or a refusal. An access of 0 bytes touches nothing and needs no
    /// right.
    #[inline(always)]
    fn whole(&self, at: Addr, len: u64, asked: Rights) -> Result<Place, Stop<M::Wait>> {
        if len == 0 {
            return Ok(Place::Scratch(0));
        }
        match self.reach(at, len, asked)? {
            (place, reach) if reach == len => Ok(place),
            _ => Err(Stop::Refused(Status::Access)),
        }
    }

    /// The place of the aligned word at `at`, or a refusal.
    #[inline(always)]
    fn word<W: Word>(&self, at: Addr, len: u64, asked: Rights) -> Result<Place, Stop<M::Wait>> {
        if !at.raw().is_multiple_of(W::align(len)) {
            return Err(Stop::Refused(Status::Invalid));
        }
        self.whole(at, len, asked)
    }

    /// The size class that an ALLOCATE takes its buffer from, or a refusal if the buffers do not hold the data.
    fn class_for(&self, op: &OpView<'_>) -> Result<&'static Class, Stop<M::Wait>> {
        if !self.may(Rights::ALLOCATE)? {
            return Err(Stop::Refused(Status::Access));
        }
        let list = u8::try_from(op.target().raw()).ok().and_then(Class::get);
        list.filter(|class| op.len() <= u64::from(class.size)).ok_or(Stop::Refused(Status::Invalid))
    }

    // The next functions handle buffers, which are reserved before the first op, retired by ops, and freed after the
    // last op if unused.

    /// Reserves a buffer for every ALLOCATE. If one buffer is not available, returns false and keeps none.
    fn reserve(&mut self, chain: &ChainView<'_>) -> Result<bool, M::Wait> {
        let arena = Arena::of(self.memory);
        let allocates = chain.ops().filter(|op| op.code() == Code::Allocate);
        for (slot, op) in allocates.enumerate() {
            self.reserved[slot] = match self.class_for(&op) {
                Ok(class) => {
                    let supply = if op.mode() == 0 { Supply::Quota } else { Supply::Reserve };
                    let region = self.key.region();
                    let taken = match arena.reuse(self.by, region, class)? {
                        Some(buffer) => Ok(buffer),
                        None => arena.take(region, class, supply, self.by.owner)?,
                    };
                    match taken {
                        Ok(buffer) => buffer,
                        Err(Empty::NotReady | Empty::Damaged) => {
                            self.give_back_unused()?;
                            return Ok(false);
                        }
                    }
                }
                Err(Stop::Refused(_)) => 0, // The op itself will be refused for the same reason.
                Err(Stop::Wait(wait)) => return Err(wait),
            };
        }
        Ok(true)
    }

    /// Skips an op. If the op is an ALLOCATE, its reserved buffer stays in `reserved` and is freed after the last op.
    #[inline]
    fn skip(&mut self, op: &OpView<'_>) {
        self.next_reserved += usize::from(op.code() == Code::Allocate);
    }

    fn give_back_unused(&mut self) -> Result<(), M::Wait> {
        let arena = Arena::of(self.memory);
        for (slot, &at) in self.reserved.iter().enumerate() {
            if at == 0 || self.allocated & (1 << slot) != 0 {
                continue;
            }
            // Another client of the store may have retired the buffer, which is then on that client's list.
            if let Some((region, buffer)) = arena.buffer_at(at)?
                && arena.withdraw(&buffer, self.by.owner)?
            {
                arena.give(region, &buffer)?;
            }
        }
        Ok(())
    }

    /// Retires the buffers that a reclaiming CAS with this `status` made unreachable. The chain itself retires them, so
    /// a lost reply leaks nothing.
    ///
    /// The process may die before any of the accesses. The cases:
    ///
    /// 1. The chain has not swapped. Its allocated buffers are live, owned by a dead session and unreachable, so a scan
    ///    frees them.
    /// 2. The chain has swapped, and the unlinked buffer is live. A scan frees that buffer once the buffer's owner is
    ///    gone as well.
    /// 3. The chain has made the unlinked buffer RETIRED but not linked it into a list. The buffer's state names a dead
    ///    session, so a scan finds it.
    /// 4. The chain has linked the unlinked buffer. The node frees it with the dead session's list.
    #[inline(never)]
    fn reclaim(&mut self, status: Status, reply: &mut Reply) -> Result<(), M::Wait> {
        let mut undecided = std::mem::take(&mut self.undecided);
        if status == Status::Ok && mutants::WINNER_LOSES_BUFFER.is_on() {
            self.retire(self.unlinked, reply)?;
        } else if status == Status::Ok {
            // The swap installed one of the undecided buffers. Any other undecided buffers belong to the client.
            return self.retire(self.unlinked, reply);
        }
        let keeps = match status {
            Status::CasFailed => mutants::LOSER_KEEPS_BUFFER.is_on(),
            _ => mutants::SKIPPED_KEEPS_BUFFER.is_on(),
        };
        if keeps {
            undecided = 0;
        }
        // These buffers are retired, not freed at once like unused ones: later ops of this chain may reach them through
        // scratch.
        for slot in 0..self.reserved.len() {
            if undecided & (1 << slot) != 0 {
                self.retire(self.reserved[slot], reply)?;
            }
        }
        Ok(())
    }

    /// Retires the buffer at `at`, if it is a live buffer of the chain's region. The rights are those of the chain's
    /// first access, even if the key or store has changed in the meantime.
    fn retire(&self, at: u64, reply: &mut Reply) -> Result<(), M::Wait> {
        let (arena, region) = (Arena::of(self.memory), self.key.region());
        if at == 0 {
            return Ok(());
        }
        if mutants::RECLAIMED_WITHOUT_GRACE.is_on() {
            if arena.release(region, at)? {
                reply.count_retired(Retirees::Node);
            }
            return Ok(());
        }
        if let Some(list) = arena.retire(self.by.retires, region, at)? {
            reply.count_retired(list);
        }
        Ok(())
    }

    // The next functions move bytes.

    #[inline(always)]
    fn fetch(&self, place: Place, out: &mut [u8]) -> Result<(), M::Wait> {
        match place {
            Place::Node(at) if out.len() == 16 && at.is_multiple_of(16) => {
                // 16 bytes are most likely a slot: read them in one atomic load, which matches the CAS that changes
                // slots.
                out.copy_from_slice(&self.memory.load(at, Width::W16)?.to_le_bytes());
            }
            Place::Node(at) => self.memory.read(at, out)?,
            Place::Scratch(offset) => out.copy_from_slice(&self.scratch[offset..offset + out.len()]),
        }
        Ok(())
    }

    #[inline]
    fn store(&mut self, place: Place, bytes: &[u8]) -> Result<(), M::Wait> {
        match place {
            Place::Node(at) => self.memory.write(at, bytes)?,
            Place::Scratch(offset) => self.scratch[offset..offset + bytes.len()].copy_from_slice(bytes),
        }
        Ok(())
    }

    /// Stores the first `len` bytes of `pieces`, one piece after another.
    #[inline]
    fn store_pieces<'a>(
        &mut self,
        place: Place,
        pieces: impl Iterator<Item = &'a [u8]>,
        len: usize,
    ) -> Result<(), M::Wait> {
        let mut done = 0;
        for piece in pieces {
            let piece = &piece[..piece.len().min(len - done)];
            if !piece.is_empty() {
                self.store(place.plus(done), piece)?;
            }
            done += piece.len();
        }
        Ok(())
    }

    /// Copies `len` bytes; the ranges may overlap. Each chunk ends at an aligned word of the source, so that no word is
    /// copied in two parts.
    fn copy(&mut self, from: Place, to: Place, len: usize) -> Result<(), M::Wait> {
        let (lead, backwards) = match (from, to) {
            (Place::Node(from), Place::Node(to)) => {
                ((from % WIDE_ALIGN) as usize, from < to && to - from < len as u64)
            }
            (Place::Node(from), Place::Scratch(_)) => ((from % WIDE_ALIGN) as usize, false),
            (Place::Scratch(_), _) => (0, false), // One chunk.
        };
        let chunks = (lead + len).div_ceil(COPY_CHUNK);
        let mut bytes = [0; COPY_CHUNK];
        for turn in 0..chunks {
            let chunk = if backwards { chunks - 1 - turn } else { turn };
            let start = (chunk * COPY_CHUNK).saturating_sub(lead);
            let end = ((chunk + 1) * COPY_CHUNK - lead).min(len);
            let bytes = &mut bytes[..end - start];
            self.fetch(from.plus(start), bytes)?;
            self.store(to.plus(start), bytes)?;
        }
        Ok(())
    }

    #[inline(always)]
    fn load<W: Word>(&self, place: Place, len: u64) -> Result<W, M::Wait> {
        match place {
            Place::Node(at) => W::load(self.memory, at, len),
            Place::Scratch(offset) => Ok(W::from_bytes(&self.scratch[offset..offset + len as usize])),
        }
    }

    #[inline]
    fn exchange<W: Word>(
        &mut self,
        place: Place,
        len: u64,
        old: W,
        new: W,
    ) -> Result<Result<(), W>, M::Wait> {
        match place {
            Place::Node(at) => W::exchange(self.memory, at, len, old, new),
            Place::Scratch(offset) => {
                // Scratch is private to the chain, so it is unchanged since it was loaded.
                let bytes = len as usize;
                self.scratch[offset..offset + bytes].copy_from_slice(&new.to_bytes().as_ref()[..bytes]);
                Ok(Ok(()))
            }
        }
    }
}

impl Place {
    #[inline]
    fn plus(self, bytes: usize) -> Place {
        match self {
            Place::Node(at) => Place::Node(at + bytes as u64),
            Place::Scratch(offset) => Place::Scratch(offset + bytes),
        }
    }
}

#[inline]
fn take_word<W: Word>(operands: &mut &[u8], len: u64) -> W {
    let (taken, rest) = operands.split_at(len as usize);
    *operands = rest;
    W::from_bytes(taken)
}

/// The pointer at byte `offset` of a word.
#[inline(always)]
fn pointer_in<W: Word>(word: W, offset: u32) -> u64 {
    let (word, offset) = (word.to_bytes(), offset as usize);
    u64::from_le_bytes(word.as_ref()[offset..offset + 8].try_into().expect("eight bytes"))
}

/// A memory access that a chain will probably make, for prefetching. A wrong hint is harmless.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// The chain will access at most `len` bytes at `at`.
    Bytes {
        /// Address of the first byte.
        at: u64,
        /// Maximum number of bytes.
        len: u32,
    },
    /// The chain will access at most `len` bytes behind the pointer at `at`.
    Pointee {
        /// Address of the pointer.
        at: u64,
        /// Maximum number of bytes.
        len: u32,
        /// Whether the pointer has a bound.
        bounded: bool,
    },
    /// The chain will replace the pointer at `at`, and retire the buffer behind it.
    Replaced {
        /// Address of the pointer.
        at: u64,
    },
    /// The chain will take a buffer of this class and fill it with `len` bytes.
    Buffer {
        /// Number of the free list.
        class: u8,
        /// Number of bytes to be stored.
        len: u32,
    },
}

/// Passes to `say`, op by op, the accesses to prefetch before the chain runs.
#[inline(always)]
pub fn hints(chain: ChainView<'_>, mut say: impl FnMut(Hint)) {
    match chain.only_read() {
        Some(read) => hint(read, None).into_iter().for_each(say),
        None => hints_of_ops(chain, &mut say),
    }
}

#[inline]
fn hints_of_ops(chain: ChainView<'_>, say: &mut impl FnMut(Hint)) {
    // The last copy from memory to scratch: its addresses in scratch and in memory. A pointer that is copied before it
    // is followed is hinted at where it is in memory.
    let mut copied = None;
    for op in chain.ops() {
        if let (Code::Read, Some(to)) = (op.code(), op.redirect())
            && to.scratch_offset().is_some()
            && op.target().scratch_offset().is_none()
        {
            copied = Some((to, op.target()));
        }
        if let Some(hint) = hint(op.header(), copied) {
            say(hint);
        }
    }
}

#[inline(always)]
fn hint(op: &OpHeader, copied: Option<(Addr, Addr)>) -> Option<Hint> {
    let len = op.len.get();
    let at = match copied {
        Some((to, from)) if op.target() == to && op.has(flag::TARGET_INDIRECT) => from,
        _ => op.target(),
    };
    match op.code() {
        Code::Allocate => Some(Hint::Buffer { class: at.raw() as u8, len }),
        Code::Retire => None,
        _ if at.scratch_offset().is_some() => None,
        _ if op.has(flag::TARGET_INDIRECT) => {
            Some(Hint::Pointee { at: at.raw(), len, bounded: op.has(flag::BOUNDED) })
        }
        Code::Cas if op.has(flag::RECLAIMING) => Some(Hint::Replaced { at: at.raw() + u64::from(len) }),
        Code::Cas | Code::FetchAdd => Some(Hint::Bytes { at: at.raw(), len: 16 }),
        Code::Read | Code::Write => Some(Hint::Bytes { at: at.raw(), len }),
    }
}
