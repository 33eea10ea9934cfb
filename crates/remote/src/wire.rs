//! The wire format of chains and replies, which every fabric carries and the fuzzers test.
//!
//! ```text
//! chain:  | secret u64 | region u32 | bytes u32 | ops u16 | allocates u16 | atomics u16 | 0 u16 |  24 bytes, then ops
//! op:     | code u8 | flags u8 | mode u8 | width u8 | len u32 | at u64 |              16 bytes, then, as flagged,
//!         [ redirect u64 ] [ source u64 ] [ payload ]
//! reply:  { | status u8 | 0 u8 x 3 | end u32 | } per op, then the outputs; `end` counts from the first output
//! ```
//!
//! All numbers are little-endian. `bytes` counts everything after the chain's header. A payload is the data of a WRITE
//! or an ALLOCATE; for CAS `[compare] [swap] [compare mask, swap mask]`, each of `width` bytes; for FETCH-ADD the
//! addend; for RETIRE the addresses of buffers, 8 bytes each. The `len` of a reclaiming CAS is the offset of the
//! pointer in its word. The highest bit of `mode` marks a fenced op.
//! Invariant: a decoded chain is well-formed to its last byte, so no later step can fail to parse it.

use crate::address::Addr;
use crate::key::Key;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Maximum number of ops in one chain.
pub const OPS_MAX: usize = 64;
/// Maximum number of ALLOCATEs in one chain, all of which a runner reserves before the first op.
pub const ALLOCATES_MAX: usize = 16;
/// Maximum number of buffers in one RETIRE.
pub const RETIRES_MAX: usize = 1024;
/// Maximum size of one chain on the wire, including its header, in bytes.
pub const CHAIN_BYTES_MAX: usize = 64 * 1024;
/// Maximum size of one reply on the wire, including the per-op entries, in bytes.
pub const REPLY_BYTES_MAX: usize = 64 * 1024;

/// The header of a chain.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ChainHeader {
    /// The key under which every op runs.
    pub key: Key,
    /// Number of bytes that follow this header.
    pub bytes: U32,
    /// Number of ops.
    pub ops: U16,
    /// Number of ALLOCATEs.
    pub allocates: U16,
    /// Number of CAS and FETCH-ADD ops.
    pub atomics: U16,
    /// Reserved; must be zero.
    pub reserved: U16,
}

impl ChainHeader {
    /// Returns the header of an empty chain.
    #[inline(always)]
    pub(crate) const fn empty(key: Key) -> ChainHeader {
        ChainHeader {
            key,
            bytes: U32::ZERO,
            ops: U16::ZERO,
            allocates: U16::ZERO,
            atomics: U16::ZERO,
            reserved: U16::ZERO,
        }
    }
}

/// The header of an op.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct OpHeader {
    /// Code of the op: a [`Code`].
    pub code: u8,
    /// Flags of the op: bits of [`flag`].
    pub flags: u8,
    /// A [`crate::Mode`] for CAS, 1 for an ALLOCATE that may use the reserve, else 0. READ, WRITE, CAS and FETCH-ADD
    /// may add [`FENCED`].
    pub mode: u8,
    /// Size of the word in bytes: 8, 16, 24 or 32 for CAS, 8 for FETCH-ADD, else 0.
    pub width: u8,
    /// Number of bytes to read, to write or to store in the new buffer. For RETIRE, the size of its list of addresses
    /// in bytes. For a reclaiming CAS, the offset of the pointer in its word.
    pub len: U32,
    /// Address of the target; for ALLOCATE the number of the free list; for RETIRE 0.
    pub at: U64,
}

/// Bit of [`OpHeader::mode`]: the op starts only after all earlier READs and atomics of its queue pair have completed.
/// Valid for the verbs of a NIC: READ, WRITE, CAS and FETCH-ADD. All bits of [`OpHeader::flags`] are in use.
pub const FENCED: u8 = 1 << 7;

pub(crate) const CHAIN_HEADER: usize = size_of::<ChainHeader>();
pub(crate) const OP_HEADER: usize = size_of::<OpHeader>();
const _: () = assert!(CHAIN_HEADER == 24 && OP_HEADER == 16);

/// Code of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Code {
    /// READ: copies bytes out of the node's memory.
    Read = 1,
    /// WRITE: copies bytes into the node's memory.
    Write = 2,
    /// ALLOCATE: takes a buffer from a free list and fills it.
    Allocate = 3,
    /// CAS: compares and swaps one word.
    Cas = 4,
    /// FETCH-ADD: adds to an 8-byte word.
    FetchAdd = 5,
    /// RETIRE: declares buffers unreachable, so that the node frees them.
    Retire = 6,
}

/// The flag bits of an op (PRISM, section 3.4, defines five flags but not their positions).
pub mod flag {
    /// `at` is the address of a pointer to the target.
    pub const TARGET_INDIRECT: u8 = 1 << 0;
    /// The data is at `source`, in the node's memory or scratch.
    pub const DATA_INDIRECT: u8 = 1 << 1;
    /// The pointer at `at` is a [`crate::BoundedPtr`], whose bound limits the length of the access.
    pub const BOUNDED: u8 = 1 << 2;
    /// The op is skipped unless the previous op was successful.
    pub const CONDITIONAL: u8 = 1 << 3;
    /// The output goes to `redirect` instead of to the reply.
    pub const REDIRECT: u8 = 1 << 4;
    /// The CAS has a separate compare operand. Without this flag the CAS compares with the swap operand.
    pub const COMPARE: u8 = 1 << 5;
    /// The CAS compares and swaps under masks.
    pub const MASKED: u8 = 1 << 6;
    /// The CAS retires the buffers that it makes unreachable.
    pub const RECLAIMING: u8 = 1 << 7;
}

impl Code {
    /// The code with this number, if it exists.
    pub const fn from_u8(code: u8) -> Option<Code> {
        match code {
            1 => Some(Code::Read),
            2 => Some(Code::Write),
            3 => Some(Code::Allocate),
            4 => Some(Code::Cas),
            5 => Some(Code::FetchAdd),
            6 => Some(Code::Retire),
            _ => None,
        }
    }

    /// Whether the op compares or adds to a word atomically: CAS or FETCH-ADD.
    #[inline]
    pub const fn is_atomic(self) -> bool {
        matches!(self, Code::Cas | Code::FetchAdd)
    }

    /// Whether the op may be fenced ([`FENCED`]): a NIC without PRISM's operations has a verb for it.
    #[inline]
    pub const fn may_be_fenced(self) -> bool {
        matches!(self, Code::Read | Code::Write | Code::Cas | Code::FetchAdd)
    }

    /// The flags that are valid for this op. Any other flag makes the chain malformed.
    pub const fn flags(self) -> u8 {
        use flag::*;
        match self {
            Code::Read => TARGET_INDIRECT | BOUNDED | CONDITIONAL | REDIRECT,
            Code::Write => TARGET_INDIRECT | BOUNDED | DATA_INDIRECT | CONDITIONAL,
            Code::Allocate => CONDITIONAL | REDIRECT,
            Code::Cas => {
                TARGET_INDIRECT | DATA_INDIRECT | CONDITIONAL | REDIRECT | COMPARE | MASKED | RECLAIMING
            }
            Code::FetchAdd => CONDITIONAL | REDIRECT,
            Code::Retire => CONDITIONAL,
        }
    }
}

impl OpHeader {
    /// Returns the op's code.
    #[inline(always)]
    pub(crate) fn code(&self) -> Code {
        Code::from_u8(self.code).expect("a chain was run without validation")
    }

    pub(crate) const fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// The op's mode without the bit [`FENCED`].
    #[inline(always)]
    pub(crate) const fn plain_mode(&self) -> u8 {
        self.mode & !FENCED
    }

    /// Size of the payload that follows the header and its optional addresses, in bytes.
    #[inline]
    pub fn payload_len(&self) -> usize {
        match Code::from_u8(self.code) {
            Some(Code::Write) if !self.has(flag::DATA_INDIRECT) => self.len.get() as usize,
            Some(Code::Allocate | Code::Retire) => self.len.get() as usize,
            Some(Code::Cas) => {
                let operands = usize::from(self.has(flag::COMPARE))
                    + usize::from(!self.has(flag::DATA_INDIRECT))
                    + 2 * usize::from(self.has(flag::MASKED));
                operands * usize::from(self.width)
            }
            Some(Code::FetchAdd) => 8,
            _ => 0,
        }
    }

    /// Checks the fields of the header by themselves.
    #[inline]
    pub(crate) fn validate(&self) -> Result<Code, WireError> {
        let code = Code::from_u8(self.code).ok_or(WireError::UnknownOp(self.code))?;
        if self.flags & !code.flags() != 0 {
            return Err(WireError::Flags { code, flags: self.flags });
        }
        if self.has(flag::BOUNDED) && !self.has(flag::TARGET_INDIRECT) {
            return Err(WireError::BoundedButDirect);
        }
        let len = self.len.get() as usize;
        // The length of a READ is unbounded here: if the output does not fit the reply, the op fails when it runs.
        if len > CHAIN_BYTES_MAX && code != Code::Read {
            return Err(WireError::TooLong { bytes: len });
        }
        let (mode_max, has_width) = match code {
            Code::Cas => (crate::op::Mode::MAX, matches!(self.width, 8 | 16 | 24 | 32)),
            Code::FetchAdd => (0, self.width == 8),
            Code::Allocate => (1, self.width == 0),
            Code::Read | Code::Write | Code::Retire => (0, self.width == 0),
        };
        let mode = if code.may_be_fenced() { self.plain_mode() } else { self.mode };
        if mode > mode_max {
            return Err(WireError::Mode(self.mode));
        }
        if !has_width {
            return Err(WireError::Width(self.width));
        }
        let (address, most) = (size_of::<Addr>(), RETIRES_MAX * size_of::<Addr>());
        match code {
            Code::Cas if self.has(flag::RECLAIMING) && len + address <= self.width.into() => Ok(code),
            Code::Cas if self.has(flag::RECLAIMING) => Err(WireError::PointerOffset(len)),
            Code::Cas | Code::FetchAdd if len != 0 => Err(WireError::TooLong { bytes: len }),
            Code::Retire if self.at.get() != 0 => Err(WireError::Reserved),
            Code::Retire if !len.is_multiple_of(address) || len > most => {
                Err(WireError::Retired { bytes: len })
            }
            _ => Ok(code),
        }
    }

    pub(crate) fn target(&self) -> Addr {
        Addr::new(self.at.get())
    }
}

/// Reason why bytes are not a valid chain or reply. No op of a malformed chain ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireError {
    /// The bytes end before the end of the chain.
    Truncated,
    /// The header announces more bytes than a chain may have, or than its ops use.
    TooLong {
        /// Number of bytes.
        bytes: usize,
    },
    /// The chain has more ops than [`OPS_MAX`], or not the number that its header announces.
    OpCount(usize),
    /// The chain has more ALLOCATEs than [`ALLOCATES_MAX`], or not the number that its header announces.
    AllocateCount(usize),
    /// The chain's number of CAS and FETCH-ADD ops is not the number that its header announces.
    AtomicCount(usize),
    /// No op has this code.
    UnknownOp(u8),
    /// An op has a flag that is invalid for its code.
    Flags {
        /// The op's code.
        code: Code,
        /// The op's flags.
        flags: u8,
    },
    /// An op is BOUNDED but its target is not indirect.
    BoundedButDirect,
    /// A CAS has an invalid compare mode, or another op has a mode that is invalid for its code.
    Mode(u8),
    /// An op has an invalid word width.
    Width(u8),
    /// The pointer of a reclaiming CAS does not fit into its word.
    PointerOffset(usize),
    /// The payload of a RETIRE is not a list of at most [`RETIRES_MAX`] addresses.
    Retired {
        /// Size of the list, in bytes.
        bytes: usize,
    },
    /// A reserved field of a header is not zero.
    Reserved,
    /// The statuses or the output ends of a reply are invalid.
    Reply,
}

impl std::fmt::Display for WireError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            WireError::Truncated => write!(f, "the chain is truncated"),
            WireError::TooLong { bytes } => {
                write!(f, "{bytes} bytes exceed the limit (a chain has at most {CHAIN_BYTES_MAX})")
            }
            WireError::OpCount(n) => write!(f, "{n} ops: not the announced number, or more than {OPS_MAX}"),
            WireError::AllocateCount(n) => {
                write!(f, "{n} ALLOCATEs: not the announced number, or more than {ALLOCATES_MAX}")
            }
            WireError::AtomicCount(n) => write!(f, "{n} atomics: not the announced number"),
            WireError::UnknownOp(code) => write!(f, "unknown op code {code}"),
            WireError::Flags { code, flags } => write!(f, "invalid flags {flags:#04x} for {code:?}"),
            WireError::BoundedButDirect => write!(f, "a bounded access must be indirect"),
            WireError::Mode(mode) => write!(f, "invalid mode {mode}"),
            WireError::Width(width) => write!(f, "invalid word width of {width} bytes"),
            WireError::PointerOffset(at) => write!(f, "an 8-byte pointer at byte {at} exceeds the word"),
            WireError::Retired { bytes } => {
                write!(f, "{bytes} bytes are not a list of at most {RETIRES_MAX} addresses")
            }
            WireError::Reserved => write!(f, "a reserved field is not zero"),
            WireError::Reply => write!(f, "invalid entries in the reply"),
        }
    }
}

impl std::error::Error for WireError {}
