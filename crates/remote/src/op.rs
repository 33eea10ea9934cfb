//! The operations: RDMA's verbs with PRISM's extensions (PRISM, table 1), as values.
//!
//! Invariant: an op carries the type of its output, so a reply is read as the type that was requested.
//!
//! Differs from the paper (table 1): a CAS has separate compare and swap operands, since "expect old, install new"
//! cannot be expressed with one operand. A mode means `target OP compare`. Ordering modes compare the masked bytes as
//! one big-endian number, so that `RC|TS > PW|PR` has the meaning of section 8 of the paper.

use crate::address::Addr;
use crate::memory::Width;
use crate::wire::{Code, FENCED, RETIRES_MAX, flag};
use std::cmp::Ordering;
use std::marker::PhantomData;
use zerocopy::{Immutable, IntoBytes};

/// The operator OP with which a CAS compares: `target OP compare`, on the masked bytes of both operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Mode {
    /// The target equals the compare operand.
    Eq = 0,
    /// The target differs from the compare operand.
    Ne = 1,
    /// The target is less than the compare operand: "install if newer".
    Lt = 2,
    /// The target is less than or equal to the compare operand.
    Le = 3,
    /// The target is greater than the compare operand.
    Gt = 4,
    /// The target is greater than or equal to the compare operand.
    Ge = 5,
}

impl Mode {
    pub(crate) const MAX: u8 = Mode::Ge as u8;

    /// All modes.
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
            _ => panic!("a chain was run without validation: its CAS has an invalid mode"),
        }
    }

    /// Whether `target OP compare` holds for two words, given with the byte at the lowest address as the least
    /// significant.
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

    /// Whether `target OP compare` holds, given how the target compares to the compare operand.
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

/// One request. `T` is the type of its output: `[u8]` or a value for a READ, the old value for CAS and FETCH-ADD, the
/// new buffer's address for ALLOCATE, `()` if the op has no output or redirects it.
#[must_use = "an op does nothing until it is added to a chain"]
pub struct Op<'a, T: ?Sized> {
    pub(crate) code: Code,
    pub(crate) flags: u8,
    pub(crate) mode: u8,
    pub(crate) width: u8,
    pub(crate) len: u32,
    pub(crate) at: Addr,
    pub(crate) redirect: Addr,
    pub(crate) source: Addr,
    /// The parts of the payload in wire order. For CAS: compare, swap, compare mask, swap mask.
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

    /// Makes the target indirect: the given address holds a pointer to it (PRISM, section 3.1).
    ///
    /// # Panics
    /// For ALLOCATE, FETCH-ADD and RETIRE, which have no indirect form.
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

    /// Makes the pointer to the target a [`crate::BoundedPtr`], whose bound limits the length of the access.
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

    /// Redirects the output to `to`, in the node's memory or scratch, instead of the reply (PRISM, section 3.4).
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

    /// Makes the op start only after all earlier READs and atomics of its queue pair have completed, those of earlier
    /// chains included (`IBV_SEND_FENCE`). All later ops start after this one. The fence does not wait for WRITEs,
    /// because a NIC orders a WRITE before every later op anyway.
    ///
    /// Fabrics that run the ops of a chain in order ignore the fence. If a NIC executes the chain's ops as verbs, it
    /// may otherwise start an op before an earlier READ or atomic has completed.
    ///
    /// # Panics
    /// For ALLOCATE and RETIRE, which no NIC has.
    #[inline(always)]
    pub fn fenced(mut self) -> Self {
        assert!(self.code.may_be_fenced(), "{:?} cannot be fenced", self.code);
        self.mode |= FENCED;
        self
    }

    /// Makes the CAS reclaiming. The word holds a buffer's address at byte `pointer_at`, and the CAS retires the
    /// buffers that it makes unreachable:
    ///
    /// * If it swaps and the pointer changes: the buffer that the old pointer named.
    /// * Otherwise (it failed, was skipped, refused or aborted): all buffers that this chain has allocated since its
    ///   last reclaiming CAS.
    ///
    /// An address that is not exactly that of a live buffer of the chain's region is ignored. Status and output are
    /// those of a plain CAS.
    ///
    /// Therefore a chain with ALLOCATEs and reclaiming CASes must install buffers only by these CASes: a buffer that
    /// another op has published still counts as allocated, and a failing CAS would retire it. Place each reclaiming CAS
    /// directly after its own ALLOCATEs. A CAS that swaps settles all earlier ALLOCATEs of the chain: no later CAS
    /// retires their buffers, even if the swapped word does not reach them.
    ///
    /// Requires the rights ATOMIC and ALLOCATE, and a target in the node's memory. A target in scratch is refused with
    /// [`crate::Status::Invalid`], since no other chain can follow a pointer there. After the swap, no other pointer to
    /// the old buffer may exist. If the word's pointer field holds something other than a pointer, that value must not
    /// equal a buffer's address.
    ///
    /// # Panics
    /// Unless the op is a CAS whose word holds 8 bytes at `pointer_at`.
    #[inline(always)]
    pub fn reclaiming(mut self, pointer_at: u32) -> Self {
        assert!(self.code == Code::Cas, "only a CAS can be reclaiming");
        assert!(pointer_at + 8 <= self.width as u32, "the word holds no 8-byte pointer at byte {pointer_at}");
        self.flags |= flag::RECLAIMING;
        self.len = pointer_at;
        self
    }
}

impl<'a, T: IntoBytes + Immutable> Op<'a, T> {
    /// Compares only the bits set in `compare`, and swaps only those set in `swap` (PRISM, section 3.3).
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
    /// Allows an ALLOCATE to use the store's reserve, which exists so that a full store can still be emptied.
    ///
    /// # Panics
    /// Unless the op is an ALLOCATE.
    #[inline(always)]
    pub fn from_reserve(mut self) -> Self {
        assert!(self.code == Code::Allocate, "only an ALLOCATE can use the reserve");
        self.mode = 1;
        self
    }
}

/// Reads `len` bytes. The output of a bounded or indirect access may be shorter: it ends at the bound or at the end of
/// the buffer.
#[inline(always)]
pub const fn read(at: Addr, len: u32) -> Op<'static, [u8]> {
    Op::new(Code::Read, at, len)
}

/// Reads a value of type `T`.
#[inline(always)]
pub const fn read_as<T>(at: Addr) -> Op<'static, T> {
    Op::new(Code::Read, at, size_of::<T>() as u32)
}

/// Writes `bytes`.
///
/// # Panics
/// If `bytes` exceeds the size of a chain.
#[inline(always)]
pub fn write(at: Addr, bytes: &[u8]) -> Op<'_, ()> {
    let mut op = Op::new(Code::Write, at, payload_len(&[bytes]));
    op.payload[0] = bytes;
    op
}

/// Writes `len` bytes from address `source`, in the node's memory or in scratch, to `at`.
#[inline(always)]
pub fn write_from(at: Addr, source: Addr, len: u32) -> Op<'static, ()> {
    let mut op = Op::new(Code::Write, at, len);
    op.flags |= flag::DATA_INDIRECT;
    op.source = source;
    op
}

/// Takes a buffer from `list`, fills it with the concatenated parts, and returns its address (PRISM, section 3.2).
///
/// # Panics
/// If the parts exceed the size of a chain.
#[inline(always)]
pub fn allocate<'a>(list: ListId, parts: [&'a [u8]; 3]) -> Op<'a, Addr> {
    let mut op = Op::new(Code::Allocate, Addr::new(list.0 as u64), payload_len(&parts));
    op.payload = [parts[0], parts[1], parts[2], &[]];
    op
}

/// If `target OP compare` holds, stores `swap`. Returns the old value either way (PRISM, section 3.3).
///
/// # Panics
/// Unless `T` has 8, 16, 24 or 32 bytes. Words of 24 and 32 bytes need a wide region: elsewhere the op fails with
/// [`crate::Status::Invalid`].
#[inline(always)]
pub fn cas<'a, T: IntoBytes + Immutable>(mode: Mode, at: Addr, compare: &'a T, swap: &'a T) -> Op<'a, T> {
    let mut op = word_op::<T>(Code::Cas, at);
    op.mode = mode as u8;
    op.flags |= flag::COMPARE;
    op.payload = [compare.as_bytes(), swap.as_bytes(), &[], &[]];
    op
}

/// If the target equals `expected`, stores the word at `swap_from` (data-indirect). Returns the old value.
///
/// # Panics
/// Unless `T` has 8, 16, 24 or 32 bytes. Words of 24 and 32 bytes need a wide region: elsewhere the op fails with
/// [`crate::Status::Invalid`].
#[inline(always)]
pub fn cas_from<T: IntoBytes + Immutable>(at: Addr, expected: &T, swap_from: Addr) -> Op<'_, T> {
    let mut op = word_op::<T>(Code::Cas, at);
    op.flags |= flag::COMPARE | flag::DATA_INDIRECT;
    op.source = swap_from;
    op.payload = [expected.as_bytes(), &[], &[], &[]];
    op
}

/// If `target OP data` holds, stores `data`, where `data` is the word at `data_from`. This is the CAS of PRISM's table
/// 1, with one operand. Returns the old value.
///
/// # Panics
/// Unless `T` has 8, 16, 24 or 32 bytes. Words of 24 and 32 bytes need a wide region: elsewhere the op fails with
/// [`crate::Status::Invalid`].
#[inline(always)]
pub fn cas_with<'a, T: IntoBytes + Immutable>(mode: Mode, at: Addr, data_from: Addr) -> Op<'a, T> {
    let mut op = word_op::<T>(Code::Cas, at);
    op.mode = mode as u8;
    op.flags |= flag::DATA_INDIRECT;
    op.source = data_from;
    op
}

/// Adds `addend` to the little-endian 8-byte word at `at`. The sum wraps. Returns the old value.
#[inline(always)]
pub fn fetch_add<'a>(
    at: Addr,
    addend: &'a zerocopy::little_endian::U64,
) -> Op<'a, zerocopy::little_endian::U64> {
    let mut op = word_op(Code::FetchAdd, at);
    op.payload[0] = addend.as_bytes();
    op
}

/// Retires buffers that no pointer reaches any more, if no reclaiming CAS of the chain does so. The node reuses a
/// buffer once every chain that may still follow an old pointer to that buffer has ended. An address that is not
/// exactly that of a live buffer of the chain's region is ignored. Requires the right ALLOCATE.
///
/// RETIRE must be in the chain that makes the buffers unreachable, and conditional on the op that does so. When a later
/// chain runs, the buffers may already belong to another client.
///
/// Do not repeat the RETIRE of a chain whose outcome is unknown: if the chain has run, the buffers may already be
/// reused.
///
/// # Panics
/// If there are more than [`RETIRES_MAX`] buffers.
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
