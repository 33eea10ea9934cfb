//! The bytes of a chain: what every fabric carries and every fuzzer feeds.
//!
//! ```text
//! chain:  | secret u64 | region u32 | bytes u32 | ops u16 | allocates u16 | atomics u16 | 0 u16 |  24 bytes, then ops
//! op:     | code u8 | flags u8 | mode u8 | width u8 | len u32 | at u64 |              16 bytes, then, as flagged,
//!         [ redirect u64 ] [ source u64 ] [ payload ]
//! reply:  { | status u8 | 0 u8 x 3 | end u32 | } per op, then the outputs; `end` counts from the first output
//! ```
//!
//! All numbers are little-endian. `bytes` counts everything after the chain's header. A payload is the data of a
//! WRITE or an ALLOCATE; for CAS `[compare] [swap] [compare mask, swap mask]`, each of `width`; for FETCH-ADD the
//! addend; for RETIRE the addresses of buffers, 8 bytes each. The `len` of a reclaiming CAS is where in its word the
//! pointer lies. Invariant: a chain that decodes is well-formed to its last byte; nothing later can fail to parse.

use crate::address::Addr;
use crate::key::Key;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The most ops in one chain.
pub const OPS_MAX: usize = 64;
/// The most ALLOCATEs in one chain: what a runner reserves before the first op.
pub const ALLOCATES_MAX: usize = 16;
/// The most buffers that one RETIRE names.
pub const RETIRES_MAX: usize = 1024;
/// The most bytes of one chain on the wire, header included.
pub const CHAIN_BYTES_MAX: usize = 64 * 1024;
/// The most bytes of one reply on the wire, per-op entries included.
pub const REPLY_BYTES_MAX: usize = 64 * 1024;

/// The header of a chain.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ChainHeader {
    /// The key under which every op runs.
    pub key: Key,
    /// Bytes that follow this header.
    pub bytes: U32,
    /// How many ops follow.
    pub ops: U16,
    /// How many of them are ALLOCATEs.
    pub allocates: U16,
    /// How many of them are CAS or FETCH-ADD.
    pub atomics: U16,
    /// Zero.
    pub reserved: U16,
}

impl ChainHeader {
    /// Of no ops yet.
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
    /// A [`Code`].
    pub code: u8,
    /// Of [`flag`].
    pub flags: u8,
    /// A [`crate::Mode`] for CAS, 1 for an ALLOCATE that may use the reserve, else 0.
    pub mode: u8,
    /// Of the word: 8, 16, 24 or 32 for CAS, 8 for FETCH-ADD, else 0.
    pub width: u8,
    /// Bytes read, written or put into the new buffer; bytes of the addresses of a RETIRE; of a reclaiming CAS the
    /// offset of the pointer in its word.
    pub len: U32,
    /// The target; for ALLOCATE the list; for RETIRE zero.
    pub at: U64,
}

pub(crate) const CHAIN_HEADER: usize = size_of::<ChainHeader>();
pub(crate) const OP_HEADER: usize = size_of::<OpHeader>();
const _: () = assert!(CHAIN_HEADER == 24 && OP_HEADER == 16);

/// What an op does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Code {
    /// Copies bytes out.
    Read = 1,
    /// Copies bytes in.
    Write = 2,
    /// Takes a buffer from a free list and fills it.
    Allocate = 3,
    /// Compares and swaps one word.
    Cas = 4,
    /// Adds to an 8-byte word.
    FetchAdd = 5,
    /// Gives buffers back.
    Retire = 6,
}

/// The flag bits of an op (PRISM, section 3.4, gives five and leaves their places free).
pub mod flag {
    /// `at` is where the target's address is stored.
    pub const TARGET_INDIRECT: u8 = 1 << 0;
    /// The data is at `source`, in the node's memory or scratch.
    pub const DATA_INDIRECT: u8 = 1 << 1;
    /// The pointer at `at` bounds the length.
    pub const BOUNDED: u8 = 1 << 2;
    /// Skipped unless the op before was successful.
    pub const CONDITIONAL: u8 = 1 << 3;
    /// The output goes to `redirect` instead of to the reply.
    pub const REDIRECT: u8 = 1 << 4;
    /// A CAS with a compare operand of its own; without it the swap operand is compared too.
    pub const COMPARE: u8 = 1 << 5;
    /// A CAS with masks.
    pub const MASKED: u8 = 1 << 6;
    /// A CAS that retires what it makes unreachable.
    pub const RECLAIMING: u8 = 1 << 7;
}

impl Code {
    /// The code of that number.
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

    /// Whether it exchanges a word.
    #[inline]
    pub const fn is_atomic(self) -> bool {
        matches!(self, Code::Cas | Code::FetchAdd)
    }

    /// The flags that mean something for this op; any other makes the chain malformed.
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
    /// What the op does.
    #[inline(always)]
    pub(crate) fn code(&self) -> Code {
        Code::from_u8(self.code).expect("a chain was run that was not validated")
    }

    pub(crate) const fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Bytes of payload that follow the header and its optional addresses.
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

    /// Whether the header alone is legal.
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
        // A READ asks for as much as it likes: what does not fit the reply is told when it runs.
        if len > CHAIN_BYTES_MAX && code != Code::Read {
            return Err(WireError::TooLong { bytes: len });
        }
        let (mode_max, has_width) = match code {
            Code::Cas => (crate::op::Mode::MAX, matches!(self.width, 8 | 16 | 24 | 32)),
            Code::FetchAdd => (0, self.width == 8),
            Code::Allocate => (1, self.width == 0),
            Code::Read | Code::Write | Code::Retire => (0, self.width == 0),
        };
        if self.mode > mode_max {
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

/// Why bytes are no chain. Nothing of a refused chain ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireError {
    /// The bytes end before the chain does.
    Truncated,
    /// More bytes are announced than a chain may have, or than its ops use.
    TooLong {
        /// How many.
        bytes: usize,
    },
    /// More ops than [`OPS_MAX`], or other than announced.
    OpCount(usize),
    /// More ALLOCATEs than [`ALLOCATES_MAX`], or other than announced.
    AllocateCount(usize),
    /// Other CAS and FETCH-ADD ops than announced.
    AtomicCount(usize),
    /// No op has this code.
    UnknownOp(u8),
    /// A flag that means nothing for this op.
    Flags {
        /// The op.
        code: Code,
        /// Its flags.
        flags: u8,
    },
    /// BOUNDED without an indirect target.
    BoundedButDirect,
    /// No such compare mode.
    Mode(u8),
    /// Not the width of a word that this fabric can compare.
    Width(u8),
    /// The pointer of a reclaiming CAS does not lie in its word.
    PointerOffset(usize),
    /// Not a list of at most [`RETIRES_MAX`] addresses.
    Retired {
        /// Bytes of the list.
        bytes: usize,
    },
    /// A reserved field is not zero.
    Reserved,
    /// A reply whose statuses or ends make no sense.
    Reply,
}

impl std::fmt::Display for WireError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            WireError::Truncated => write!(f, "the chain ends early"),
            WireError::TooLong { bytes } => {
                write!(f, "{bytes} bytes are more than fit (a chain has at most {CHAIN_BYTES_MAX})")
            }
            WireError::OpCount(n) => write!(f, "{n} ops: announced otherwise, or more than {OPS_MAX}"),
            WireError::AllocateCount(n) => {
                write!(f, "{n} ALLOCATEs: announced otherwise, or more than {ALLOCATES_MAX}")
            }
            WireError::AtomicCount(n) => write!(f, "{n} atomics: announced otherwise"),
            WireError::UnknownOp(code) => write!(f, "no op has code {code}"),
            WireError::Flags { code, flags } => write!(f, "flags {flags:#04x} mean nothing for {code:?}"),
            WireError::BoundedButDirect => write!(f, "a bounded access must be indirect"),
            WireError::Mode(mode) => write!(f, "no such mode: {mode}"),
            WireError::Width(width) => write!(f, "no word of {width} bytes here"),
            WireError::PointerOffset(at) => write!(f, "no pointer lies at byte {at} of a word of that width"),
            WireError::Retired { bytes } => {
                write!(f, "{bytes} bytes are no list of at most {RETIRES_MAX} addresses")
            }
            WireError::Reserved => write!(f, "a reserved field is not zero"),
            WireError::Reply => write!(f, "the reply's entries make no sense"),
        }
    }
}

impl std::error::Error for WireError {}
