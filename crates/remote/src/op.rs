//! The operations: RDMA's verbs with PRISM's extensions (PRISM, table 1), as values.
//!
//! Invariant: an op carries the type of its output, so that a reply is read as what was asked for.
//! Where we leave table 1: CAS has separate compare and swap operands, without which "expect old, install new"
//! cannot be said; its modes read `target OP compare`; ordering modes compare the masked bytes as one big-endian
//! number, so that `RC|TS > PW|PR` means what section 8 of the paper says.

use crate::address::Addr;
use crate::memory::Width;
use crate::wire::{Code, RETIRES_MAX, flag};
use std::cmp::Ordering;
use std::marker::PhantomData;
use zerocopy::{Immutable, IntoBytes};

/// How CAS compares: `target OP compare`, on the masked bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Mode {
    /// Equal.
    Eq = 0,
    /// Not equal.
    Ne = 1,
    /// The target is less: "install if newer".
    Lt = 2,
    /// The target is less or equal.
    Le = 3,
    /// The target is greater.
    Gt = 4,
    /// The target is greater or equal.
    Ge = 5,
}

impl Mode {
    pub(crate) const MAX: u8 = Mode::Ge as u8;

    /// All six.
    pub const ALL: [Mode; 6] = [Mode::Eq, Mode::Ne, Mode::Lt, Mode::Le, Mode::Gt, Mode::Ge];

    #[inline]
    pub(crate) const fn from_u8(mode: u8) -> Mode {
        match mode {
            0 => Mode::Eq,
            1 => Mode::Ne,
            2 => Mode::Lt,
            3 => Mode::Le,
            4 => Mode::Gt,
            5 => Mode::Ge,
            _ => panic!("a chain was run that was not validated: its CAS has no mode"),
        }
    }

    /// Whether `target OP compare` holds for two words whose lowest byte comes first in memory.
    #[inline]
    pub const fn holds(self, width: Width, target: u128, compare: u128) -> bool {
        match self {
            Mode::Eq => target == compare,
            Mode::Ne => target != compare,
            Mode::Lt => big_endian(width, target) < big_endian(width, compare),
            Mode::Le => big_endian(width, target) <= big_endian(width, compare),
            Mode::Gt => big_endian(width, target) > big_endian(width, compare),
            Mode::Ge => big_endian(width, target) >= big_endian(width, compare),
        }
    }

    /// Whether `target OP compare` holds for two words that compare so.
    pub(crate) const fn holds_for(self, target_to_compare: Ordering) -> bool {
        match self {
            Mode::Eq => target_to_compare.is_eq(),
            Mode::Ne => target_to_compare.is_ne(),
            Mode::Lt => target_to_compare.is_lt(),
            Mode::Le => target_to_compare.is_le(),
            Mode::Gt => target_to_compare.is_gt(),
            Mode::Ge => target_to_compare.is_ge(),
        }
    }
}

/// The word's bytes as a number whose most significant byte has the lowest address.
#[inline]
pub(crate) const fn big_endian(width: Width, word: u128) -> u128 {
    match width {
        Width::W8 => (word as u64).swap_bytes() as u128,
        Width::W16 => word.swap_bytes(),
    }
}

/// A free list of the chain's region: buffers of one size class. See [`crate::arena::class`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListId(pub u32);

/// One request. `T` is the type of its output: `[u8]` for a READ of so many bytes, the old value for CAS, the new
/// buffer's address for ALLOCATE, nothing once it is redirected.
#[must_use = "an op does nothing until a chain has it"]
pub struct Op<'a, T: ?Sized> {
    pub(crate) code: Code,
    pub(crate) flags: u8,
    pub(crate) mode: u8,
    pub(crate) width: u8,
    pub(crate) len: u32,
    pub(crate) at: Addr,
    pub(crate) redirect: Addr,
    pub(crate) source: Addr,
    /// The payload in wire order; for CAS compare, swap, compare mask, swap mask.
    pub(crate) payload: [&'a [u8]; 4],
    output: PhantomData<fn() -> Box<T>>,
}

impl<'a, T: ?Sized> Op<'a, T> {
    #[inline(always)]
    const fn new(code: Code, at: Addr, len: u32) -> Op<'a, T> {
        Op {
            code,
            flags: 0,
            mode: 0,
            width: 0,
            len,
            at,
            redirect: Addr::NULL,
            source: Addr::NULL,
            payload: [&[]; 4],
            output: PhantomData,
        }
    }

    /// The target's address is itself in memory, at the given place (PRISM, section 3.1).
    ///
    /// # Panics
    /// For ALLOCATE, FETCH-ADD and RETIRE, which have no target to look up.
    #[inline(always)]
    pub fn indirect(mut self) -> Self {
        assert!(
            matches!(self.code, Code::Read | Code::Write | Code::Cas),
            "{:?} has no indirect form",
            self.code
        );
        self.flags |= flag::TARGET_INDIRECT;
        self
    }

    /// The pointer at the given place is a [`crate::BoundedPtr`], whose bound limits the length.
    ///
    /// # Panics
    /// Unless the op is an indirect READ or WRITE.
    #[inline(always)]
    pub fn bounded(mut self) -> Self {
        assert!(
            matches!(self.code, Code::Read | Code::Write) && self.flags & flag::TARGET_INDIRECT != 0,
            "only an indirect READ or WRITE can be bounded"
        );
        self.flags |= flag::BOUNDED;
        self
    }

    /// The output goes to `to`, in the node's memory or scratch, instead of to the caller (PRISM, section 3.4).
    ///
    /// # Panics
    /// For WRITE and RETIRE, which have no output.
    #[inline(always)]
    pub fn redirect(self, to: Addr) -> Op<'a, ()> {
        assert!(
            !matches!(self.code, Code::Write | Code::Retire),
            "{:?} has no output to redirect",
            self.code
        );
        Op {
            code: self.code,
            flags: self.flags | flag::REDIRECT,
            mode: self.mode,
            width: self.width,
            len: self.len,
            at: self.at,
            redirect: to,
            source: self.source,
            payload: self.payload,
            output: PhantomData,
        }
    }

    /// The word holds a buffer's address at byte `pointer_at`, and the CAS retires what it makes unreachable:
    ///
    /// * If it swaps and the pointer changes, the buffer that the pointer named before.
    /// * Else, whether it failed, was skipped, refused or aborted, all buffers that this chain has allocated since its
    ///   last reclaiming CAS.
    ///
    /// What is not exactly a live buffer of the chain's region is left alone. Status and output are those of a plain
    /// CAS. So a chain that allocates and has reclaiming CASes installs by these alone: a buffer that another op has
    /// shown counts as allocated like any. Each follows its own ALLOCATEs: one that swaps settles all that the chain
    /// has allocated before it, whether its word reaches that or not.
    ///
    /// Needs the rights ATOMIC and ALLOCATE, and a target in the node's memory: on scratch it is
    /// [`crate::Status::Invalid`], since nobody else can follow what is there. The swap must leave no other pointer to
    /// the old buffer, and what the word may hold instead of a buffer's address must be no buffer's address.
    ///
    /// # Panics
    /// Unless the op is a CAS, and its word holds 8 bytes at `pointer_at`.
    #[inline(always)]
    pub fn reclaiming(mut self, pointer_at: u32) -> Self {
        assert!(self.code == Code::Cas, "only a CAS makes anything unreachable");
        assert!(pointer_at + 8 <= self.width as u32, "the word has no pointer at byte {pointer_at}");
        self.flags |= flag::RECLAIMING;
        self.len = pointer_at;
        self
    }
}

impl<'a, T: IntoBytes + Immutable> Op<'a, T> {
    /// Compares only the bits of `compare`, swaps only those of `swap` (PRISM, section 3.3).
    ///
    /// # Panics
    /// Unless the op is a CAS.
    #[inline(always)]
    pub fn masked(mut self, compare: &'a T, swap: &'a T) -> Self {
        assert!(self.code == Code::Cas, "only a CAS has masks");
        self.flags |= flag::MASKED;
        self.payload[2] = compare.as_bytes();
        self.payload[3] = swap.as_bytes();
        self
    }
}

impl<'a> Op<'a, Addr> {
    /// Lets an ALLOCATE use the store's reserve, which exists so that a full store can still be emptied.
    ///
    /// # Panics
    /// Unless the op is an ALLOCATE.
    #[inline(always)]
    pub fn from_reserve(mut self) -> Self {
        assert!(self.code == Code::Allocate, "only an ALLOCATE has a reserve");
        self.mode = 1;
        self
    }
}

/// Reads `len` bytes. The output may be shorter if the access is bounded or indirect: it ends where the bound or
/// the buffer does.
#[inline(always)]
pub const fn read(at: Addr, len: u32) -> Op<'static, [u8]> {
    Op::new(Code::Read, at, len)
}

/// Reads a `T`.
#[inline(always)]
pub const fn read_as<T>(at: Addr) -> Op<'static, T> {
    Op::new(Code::Read, at, size_of::<T>() as u32)
}

/// Writes `bytes`.
///
/// # Panics
/// If there are more than a chain can carry.
#[inline(always)]
pub fn write(at: Addr, bytes: &[u8]) -> Op<'_, ()> {
    let mut op = Op::new(Code::Write, at, payload_len(&[bytes]));
    op.payload[0] = bytes;
    op
}

/// Writes the `len` bytes that are at `source` in the node's memory or in scratch.
#[inline(always)]
pub fn write_from(at: Addr, source: Addr, len: u32) -> Op<'static, ()> {
    let mut op = Op::new(Code::Write, at, len);
    op.flags |= flag::DATA_INDIRECT;
    op.source = source;
    op
}

/// Takes a buffer from `list`, fills it with the parts one after another, and answers its address (PRISM,
/// section 3.2).
///
/// # Panics
/// If the parts are more than a chain can carry.
#[inline(always)]
pub fn allocate<'a>(list: ListId, parts: [&'a [u8]; 3]) -> Op<'a, Addr> {
    let mut op = Op::new(Code::Allocate, Addr::new(list.0 as u64), payload_len(&parts));
    op.payload = [parts[0], parts[1], parts[2], &[]];
    op
}

/// If `target OP compare` holds, stores `swap`. Answers the old value either way (PRISM, section 3.3).
///
/// # Panics
/// Unless `T` has 8, 16, 24 or 32 bytes; the last two are [`crate::Status::Invalid`] where a region is not wide.
#[inline(always)]
pub fn cas<'a, T: IntoBytes + Immutable>(mode: Mode, at: Addr, compare: &'a T, swap: &'a T) -> Op<'a, T> {
    let mut op = word_op::<T>(Code::Cas, at);
    op.mode = mode as u8;
    op.flags |= flag::COMPARE;
    op.payload = [compare.as_bytes(), swap.as_bytes(), &[], &[]];
    op
}

/// If the target equals `expected`, stores the word found at `swap_from` (data-indirect). Answers the old value.
///
/// # Panics
/// Unless `T` has 8, 16, 24 or 32 bytes; the last two are [`crate::Status::Invalid`] where a region is not wide.
#[inline(always)]
pub fn cas_from<T: IntoBytes + Immutable>(at: Addr, expected: &T, swap_from: Addr) -> Op<'_, T> {
    let mut op = word_op::<T>(Code::Cas, at);
    op.flags |= flag::COMPARE | flag::DATA_INDIRECT;
    op.source = swap_from;
    op.payload = [expected.as_bytes(), &[], &[], &[]];
    op
}

/// If `target OP data` holds, stores `data`: table 1's own form, with one operand, at `data_from`.
///
/// # Panics
/// Unless `T` has 8, 16, 24 or 32 bytes; the last two are [`crate::Status::Invalid`] where a region is not wide.
#[inline(always)]
pub fn cas_with<'a, T: IntoBytes + Immutable>(mode: Mode, at: Addr, data_from: Addr) -> Op<'a, T> {
    let mut op = word_op::<T>(Code::Cas, at);
    op.mode = mode as u8;
    op.flags |= flag::DATA_INDIRECT;
    op.source = data_from;
    op
}

/// Adds `addend` to the little-endian 8-byte word at `at`, wrapping; answers the old value.
#[inline(always)]
pub fn fetch_add<'a>(
    at: Addr,
    addend: &'a zerocopy::little_endian::U64,
) -> Op<'a, zerocopy::little_endian::U64> {
    let mut op = word_op(Code::FetchAdd, at);
    op.payload[0] = addend.as_bytes();
    op
}

/// Gives back buffers that nothing points to any more, where no CAS of the chain can tell so by itself. Each is reused
/// once every chain has ended that may still follow an old pointer to it. What is not exactly a live buffer of the
/// chain's region is left alone. Needs the right ALLOCATE.
///
/// To be given in the chain that makes the buffers unreachable, and to depend on the op that does: in a later one they
/// may be others' already.
///
/// A chain whose fate is unknown may have run: its retirements must not be repeated, since the buffers may serve others
/// by then.
///
/// # Panics
/// If there are more than [`RETIRES_MAX`].
#[inline(always)]
pub fn retire(buffers: &[Addr]) -> Op<'_, ()> {
    assert!(buffers.len() <= RETIRES_MAX, "one RETIRE names at most {RETIRES_MAX} buffers");
    let mut op = Op::new(Code::Retire, Addr::NULL, size_of_val(buffers) as u32);
    op.payload[0] = buffers.as_bytes();
    op
}

#[inline(always)]
fn word_op<'a, T>(code: Code, at: Addr) -> Op<'a, T> {
    const {
        assert!(matches!(size_of::<T>(), 8 | 16 | 24 | 32), "words have 8, 16, 24 or 32 bytes");
    }
    let mut op = Op::new(code, at, 0);
    op.width = size_of::<T>() as u8;
    op
}

#[inline(always)]
fn payload_len(parts: &[&[u8]]) -> u32 {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    assert!(len <= crate::wire::CHAIN_BYTES_MAX, "{len} bytes do not fit into a chain");
    len as u32
}
