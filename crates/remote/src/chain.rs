//! A chain: ops that one runner executes in order, stored in wire form.
//!
//! The builder writes the wire form into a reusable buffer. It borrows large payloads instead of copying them; the code
//! that sends or runs the chain inserts these payloads at their places.
//! Invariant: a chain from a builder or from [`ChainView::decode`] is well-formed to its last byte, so an iteration
//! over its ops cannot fail.

use crate::address::Addr;
use crate::fabric::{FabricError, Ran};
use crate::key::Key;
use crate::op::Op;
use crate::reply::{Reply, Status};
use crate::wire::{
    ALLOCATES_MAX, CHAIN_BYTES_MAX, CHAIN_HEADER, ChainHeader, Code, FENCED, OP_HEADER, OPS_MAX, OpHeader,
    WireError, flag,
};
use std::cell::Cell;
use std::marker::PhantomData;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// Minimum size of a payload part that is borrowed, in bytes. Smaller parts are copied.
const BORROW_MIN: usize = 256;
/// Maximum number of payload parts that one chain borrows. Further parts are copied.
const PARTS_MAX: usize = 4;

/// Maximum number of pieces of a chain: its header, the parts, and the inline bytes before, between and after them.
pub const PIECES_MAX: usize = 2 * PARTS_MAX + 2;

/// The reusable buffer in which chains are built. It grows to the size of the longest chain and never shrinks.
#[derive(Debug, Default)]
pub struct ChainBuf {
    bytes: Vec<u8>,
}

/// A handle to an op's output in the reply.
pub struct Out<T: ?Sized> {
    pub(crate) index: u8,
    output: PhantomData<fn() -> Box<T>>,
}

impl<T: ?Sized> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T: ?Sized> Copy for Out<T> {}

#[derive(Clone, Copy, Debug)]
struct Part<'a> {
    /// Offset in the inline bytes at which this part is inserted.
    at: u32,
    bytes: &'a [u8],
}

/// Buffers that earlier chains have allocated and that no pointer reaches until an op of this chain publishes them.
#[derive(Clone, Copy)]
pub struct Held<'a> {
    /// Addresses of the held buffers.
    pub buffers: &'a [Addr],
    /// Index in the chain of the op that publishes the buffers if its status is [`Status::Ok`].
    pub published_by: usize,
    is_posted: &'a Cell<bool>,
}

/// A chain that is being built: ops can still be added.
pub struct Chain<'a> {
    header: ChainHeader,
    bytes: &'a mut Vec<u8>,
    parts: [Option<Part<'a>>; PARTS_MAX],
    parts_len: usize,
    held: Option<Held<'a>>,
}

impl ChainBuf {
    /// Creates an empty buffer.
    pub const fn new() -> ChainBuf {
        ChainBuf { bytes: Vec::new() }
    }

    /// Begins a chain whose ops all run under `key`. Discards the chain that was built here before.
    #[inline(always)]
    pub fn begin<'a>(&'a mut self, key: Key) -> Chain<'a> {
        self.bytes.clear();
        let parts = [const { None }; PARTS_MAX];
        Chain { header: ChainHeader::empty(key), bytes: &mut self.bytes, parts, parts_len: 0, held: None }
    }
}

impl<'a> Chain<'a> {
    /// Adds an op that runs only if the previous op was successful (CONDITIONAL). The first op always runs.
    ///
    /// # Panics
    /// If the chain exceeds a limit of [`crate::wire`]. Protocols must bound their requests.
    #[inline(always)]
    pub fn then<T: ?Sized>(&mut self, op: Op<'a, T>) -> Out<T> {
        self.push(op, flag::CONDITIONAL)
    }

    /// Adds an op that runs regardless of the previous op's status, unless an earlier op was refused.
    ///
    /// # Panics
    /// If the chain exceeds a limit of [`crate::wire`].
    #[inline(always)]
    pub fn also<T: ?Sized>(&mut self, op: Op<'a, T>) -> Out<T> {
        self.push(op, 0)
    }

    /// Declares that the op of `published_by` publishes these buffers, which earlier chains have allocated.
    ///
    /// If the future of [`crate::Fabric::run`] is cancelled, the caller does not learn whether the op published the
    /// buffers. The value of `is_posted` when the future is cancelled decides which side frees the buffers:
    ///
    /// * `true`: the fabric frees the buffers if it finds that the chain has not published them.
    /// * `false`: the chain has not run and never will, and the caller still owns the buffers.
    ///
    /// If the future completes, the caller passes the outcome to [`Chain::note_outcome`]. Buffers that were not
    /// published then belong to the caller again.
    pub fn holds<T: ?Sized>(&mut self, buffers: &'a [Addr], published_by: Out<T>, is_posted: &'a Cell<bool>) {
        self.held = Some(Held { buffers, published_by: published_by.index.into(), is_posted });
    }

    /// The buffers that the chain publishes if it succeeds, without the buffers that it allocates itself.
    pub fn held(&self) -> Option<Held<'a>> {
        self.held
    }

    /// Records that from now on the chain may run, even if the future of [`crate::Fabric::run`] is cancelled. Only the
    /// fabric calls this function.
    #[inline]
    pub fn note_posted(&self) {
        if let Some(held) = self.held {
            held.is_posted.set(true);
        }
    }

    /// Records the outcome of [`crate::Fabric::run`]. The caller of that function calls this one. Held buffers that the
    /// chain has not published belong to the caller again. Exception: if the chain may have run and its reply was lost,
    /// the buffers may be published, and the caller must not free them.
    #[inline]
    pub fn note_outcome(&self, ran: &Result<(), FabricError>) {
        if let Some(held) = self.held {
            held.is_posted.set(ran.as_ref().is_err_and(|error| error.ran() != Ran::No));
        }
    }

    #[inline(always)]
    fn push<T: ?Sized>(&mut self, op: Op<'a, T>, condition: u8) -> Out<T> {
        let index = self.header.ops.get();
        assert!((index as usize) < OPS_MAX, "a chain has at most {OPS_MAX} ops");
        let header = OpHeader {
            code: op.code as u8,
            flags: op.flags | condition,
            mode: op.mode,
            width: op.width,
            len: U32::new(op.len),
            at: U64::new(op.at.raw()),
        };
        self.append(header.as_bytes());
        if op.flags & flag::REDIRECT != 0 {
            self.append(op.redirect.as_bytes());
        }
        if op.flags & flag::DATA_INDIRECT != 0 {
            self.append(op.source.as_bytes());
        }
        if op.code != Code::Read {
            for part in op.payload {
                self.payload(part);
            }
        }
        if op.code == Code::Allocate {
            let allocates = self.header.allocates.get() + 1;
            assert!(allocates as usize <= ALLOCATES_MAX, "a chain has at most {ALLOCATES_MAX} ALLOCATEs");
            self.header.allocates = U16::new(allocates);
        }
        if op.code.is_atomic() {
            self.header.atomics = U16::new(self.header.atomics.get() + 1);
        }
        self.header.ops = U16::new(index + 1);
        Out { index: index as u8, output: PhantomData }
    }

    #[inline(always)]
    fn append(&mut self, bytes: &[u8]) {
        self.grow_by(bytes.len());
        self.bytes.extend_from_slice(bytes);
    }

    #[inline(always)]
    fn payload(&mut self, part: &'a [u8]) {
        if part.len() < BORROW_MIN || self.parts_len == PARTS_MAX {
            self.append(part);
        } else {
            self.grow_by(part.len());
            self.parts[self.parts_len] = Some(Part { at: self.bytes.len() as u32, bytes: part });
            self.parts_len += 1;
        }
    }

    #[inline(always)]
    fn grow_by(&mut self, len: usize) {
        let bytes = self.header.bytes.get() as usize + len;
        assert!(bytes <= CHAIN_BYTES_MAX - CHAIN_HEADER, "a chain has at most {CHAIN_BYTES_MAX} bytes");
        self.header.bytes = U32::new(bytes as u32);
    }

    /// Returns the key under which every op runs.
    #[inline]
    pub fn key(&self) -> Key {
        self.header.key
    }

    /// Borrows the chain for running it in this process, without a copy.
    ///
    /// # Panics
    /// If the chain is empty.
    #[inline(always)]
    pub fn view(&self) -> ChainView<'_> {
        assert!(self.header.ops.get() > 0, "an empty chain cannot be run");
        ChainView { header: &self.header, bytes: self.bytes, parts: &self.parts[..self.parts_len] }
    }

    /// Appends the wire form to `out`. This is the only time that user space copies a borrowed payload.
    ///
    /// # Panics
    /// If the chain is empty.
    pub fn write_to(&self, out: &mut Vec<u8>) {
        self.view().write_to(out);
    }
}

/// A well-formed chain, either built in this process or decoded from bytes.
#[derive(Clone, Copy)]
pub struct ChainView<'a> {
    header: &'a ChainHeader,
    /// The inline bytes: those that follow the header, without the borrowed parts.
    bytes: &'a [u8],
    parts: &'a [Option<Part<'a>>],
}

impl<'a> ChainView<'a> {
    /// Decodes the chain at the start of `bytes`. Returns the chain and the bytes that follow it.
    ///
    /// # Errors
    /// The chain is malformed. None of its ops may run.
    pub fn decode(bytes: &'a [u8]) -> Result<(ChainView<'a>, &'a [u8]), WireError> {
        let (header, rest) = ChainHeader::ref_from_prefix(bytes).map_err(|_| WireError::Truncated)?;
        let len = header.bytes.get() as usize;
        if len > CHAIN_BYTES_MAX - CHAIN_HEADER {
            return Err(WireError::TooLong { bytes: len });
        }
        let (body, rest) = rest.split_at_checked(len).ok_or(WireError::Truncated)?;
        if header.reserved.get() != 0 {
            return Err(WireError::Reserved);
        }
        let Counts { ops, allocates, atomics } = count_ops(body)?;
        if ops == 0 || ops > OPS_MAX || ops != header.ops.get() as usize {
            return Err(WireError::OpCount(ops));
        }
        if allocates > ALLOCATES_MAX || allocates != header.allocates.get() as usize {
            return Err(WireError::AllocateCount(allocates));
        }
        if atomics != header.atomics.get() as usize {
            return Err(WireError::AtomicCount(atomics));
        }
        Ok((ChainView { header, bytes: body, parts: &[] }, rest))
    }

    /// Returns the key under which every op runs.
    #[inline]
    pub fn key(&self) -> Key {
        self.header.key
    }

    /// Number of ops.
    #[inline]
    pub fn len(&self) -> usize {
        self.header.ops.get() as usize
    }

    /// Always false: a chain has at least one op.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of ALLOCATEs.
    #[inline]
    pub fn allocates(&self) -> usize {
        self.header.allocates.get() as usize
    }

    /// Number of CAS and FETCH-ADD ops.
    #[inline]
    pub fn atomics(&self) -> usize {
        self.header.atomics.get() as usize
    }

    /// Size of the wire form, in bytes.
    #[inline]
    pub fn wire_len(&self) -> usize {
        CHAIN_HEADER + self.header.bytes.get() as usize
    }

    /// Appends the chain's wire form to `out`.
    pub fn write_to(&self, out: &mut Vec<u8>) {
        self.pieces().for_each(|piece| out.extend_from_slice(piece));
    }

    /// The wire form in two pieces, header and ops. `None` if the chain borrows payloads; most chains do not.
    #[inline(always)]
    pub fn two_pieces(&self) -> Option<[&'a [u8]; 2]> {
        self.parts.is_empty().then_some([self.header.as_bytes(), self.bytes])
    }

    /// The wire form as at most [`PIECES_MAX`] consecutive pieces.
    pub fn pieces(&self) -> impl Iterator<Item = &'a [u8]> {
        let payload = Payload { bytes: self.bytes, at: 0, parts: self.parts };
        std::iter::once(self.header.as_bytes()).chain(payload)
    }

    /// The header of the chain's only op, if that op is a READ without optional addresses. Such an op is nothing but
    /// its header.
    #[inline(always)]
    pub(crate) fn only_read(&self) -> Option<&'a OpHeader> {
        let header = OpHeader::ref_from_bytes(self.bytes).ok()?;
        (header.code == Code::Read as u8).then_some(header)
    }

    /// Buffers that a chain has allocated and not published, and whose addresses only `reply` contains. These buffers
    /// leak if the reply is lost. A chain with a reclaiming CAS yields none, since that CAS retires unpublished buffers
    /// itself.
    pub fn unpublished(&self, reply: &Reply) -> impl Iterator<Item = Addr> {
        let reclaims = self.ops().any(|op| op.reclaims().is_some());
        let taken = self
            .ops()
            .enumerate()
            .filter(move |(_, op)| op.code() == Code::Allocate && op.redirect().is_none() && !reclaims);
        taken.filter_map(|(index, _)| {
            let is_taken = reply.status_at(index) == Some(Status::Ok);
            is_taken.then(|| Addr::read_from_bytes(reply.output(index)).ok()).flatten()
        })
    }

    /// Iterates over the ops in order.
    #[inline]
    pub fn ops(&self) -> Ops<'a> {
        Ops { bytes: self.bytes, at: 0, parts: self.parts }
    }
}

#[derive(Default)]
struct Counts {
    ops: usize,
    allocates: usize,
    atomics: usize,
}

/// Validates the ops in bytes from a peer. Returns the numbers of ops, ALLOCATEs and atomics.
#[inline]
fn count_ops(mut bytes: &[u8]) -> Result<Counts, WireError> {
    let mut counts = Counts::default();
    // Fast path: most chains are one READ, which is only a header.
    if let Ok(header) = OpHeader::ref_from_bytes(bytes)
        && header.code == Code::Read as u8
        && !header.has(flag::REDIRECT)
    {
        header.validate()?;
        return Ok(Counts { ops: 1, ..counts });
    }
    while !bytes.is_empty() {
        let (header, rest) = OpHeader::ref_from_prefix(bytes).map_err(|_| WireError::Truncated)?;
        let code = header.validate()?;
        let addresses =
            8 * usize::from(header.has(flag::REDIRECT)) + 8 * usize::from(header.has(flag::DATA_INDIRECT));
        bytes = rest.get(addresses + header.payload_len()..).ok_or(WireError::Truncated)?;
        counts.ops += 1;
        counts.allocates += usize::from(code == Code::Allocate);
        counts.atomics += usize::from(code.is_atomic());
        if counts.ops > OPS_MAX {
            return Err(WireError::OpCount(counts.ops));
        }
    }
    Ok(counts)
}

/// Iterates over the ops of a well-formed chain.
#[derive(Clone)]
pub struct Ops<'a> {
    bytes: &'a [u8],
    /// Offset of `bytes` within the chain's inline bytes. The offsets in `parts` count from the start of the inline
    /// bytes.
    at: usize,
    parts: &'a [Option<Part<'a>>],
}

impl<'a> Ops<'a> {
    #[inline(always)]
    fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.bytes.split_at(len);
        self.bytes = rest;
        self.at += len;
        taken
    }

    #[inline]
    fn take_addr(&mut self) -> Addr {
        Addr::read_from_bytes(self.take(size_of::<Addr>())).expect("the slice has an address's size")
    }

    /// Takes the next `len` bytes as a payload, whose pieces may be inline or borrowed.
    #[inline(always)]
    fn take_payload(&mut self, len: usize) -> Payload<'a> {
        let (at, parts) = (self.at, self.parts);
        if parts.is_empty() {
            return Payload { bytes: self.take(len), at, parts };
        }
        let (mut borrowed, mut used) = (0, 0);
        for part in parts.iter().flatten() {
            // A part belongs to this payload if the inline bytes and parts before it do not fill the payload.
            if (part.at as usize - at) + borrowed >= len {
                break;
            }
            borrowed += part.bytes.len();
            used += 1;
        }
        self.parts = &parts[used..];
        Payload { bytes: self.take(len - borrowed), at, parts: &parts[..used] }
    }
}

impl<'a> Iterator for Ops<'a> {
    type Item = OpView<'a>;

    #[inline(always)]
    fn next(&mut self) -> Option<OpView<'a>> {
        if self.bytes.is_empty() {
            return None;
        }
        let header = OpHeader::ref_from_bytes(self.take(OP_HEADER)).expect("the slice has a header's size");
        let redirect = if header.has(flag::REDIRECT) { self.take_addr() } else { Addr::NULL };
        let source = if header.has(flag::DATA_INDIRECT) { self.take_addr() } else { Addr::NULL };
        let payload = self.take_payload(header.payload_len());
        Some(OpView { header, redirect, source, payload })
    }
}

/// One op of a well-formed chain.
#[derive(Clone)]
pub struct OpView<'a> {
    header: &'a OpHeader,
    redirect: Addr,
    source: Addr,
    payload: Payload<'a>,
}

impl<'a> OpView<'a> {
    /// Returns the op's code.
    #[inline]
    pub fn code(&self) -> Code {
        self.header.code()
    }

    /// Returns the op's header.
    #[inline]
    pub fn header(&self) -> &'a OpHeader {
        self.header
    }

    /// Whether the op has this [`crate::wire::flag`].
    #[inline]
    pub fn has(&self, flag: u8) -> bool {
        self.header.has(flag)
    }

    /// The op's mode, without the bit that marks a fenced op.
    #[inline]
    pub(crate) fn mode(&self) -> u8 {
        self.header.plain_mode()
    }

    /// Whether the op starts only after all earlier READs and atomics of its queue pair have completed
    /// ([`Op::fenced`]).
    #[inline]
    pub fn is_fenced(&self) -> bool {
        self.header.mode & FENCED != 0 && self.code().may_be_fenced()
    }

    #[inline]
    pub(crate) fn width(&self) -> u8 {
        self.header.width
    }

    /// Number of bytes to read, to write or to store in the new buffer.
    #[inline]
    pub(crate) fn len(&self) -> u64 {
        u64::from(self.header.len.get())
    }

    /// The target's address, or with [`flag::TARGET_INDIRECT`] the address of the pointer to the target.
    #[inline]
    pub fn target(&self) -> Addr {
        self.header.target()
    }

    /// Address to which the output goes. `None` if it goes into the reply.
    #[inline]
    pub fn redirect(&self) -> Option<Addr> {
        self.has(flag::REDIRECT).then_some(self.redirect)
    }

    /// Address of the op's data. `None` if the chain carries the data.
    #[inline]
    pub fn source(&self) -> Option<Addr> {
        self.has(flag::DATA_INDIRECT).then_some(self.source)
    }

    /// Offset of the pointer in the word of a reclaiming CAS, in bytes. `None` for any other op.
    #[inline]
    pub(crate) fn reclaims(&self) -> Option<u32> {
        self.has(flag::RECLAIMING).then(|| self.header.len.get())
    }

    /// The op's payload as contiguous pieces, without the optional addresses.
    #[inline]
    pub fn payload(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        self.payload.clone()
    }

    /// The operands of a CAS or FETCH-ADD, which are always inline, never borrowed. Their order is that of
    /// [`crate::wire`].
    #[inline]
    pub fn operands(&self) -> &'a [u8] {
        self.payload.bytes
    }
}

/// Prints an op for people: `then READ *0x200010 65472 bytes bounded -> scratch+0`.
impl std::fmt::Display for OpView<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let when = if self.has(flag::CONDITIONAL) { "then" } else { "also" };
        let star = if self.has(flag::TARGET_INDIRECT) { "*" } else { "" };
        write!(f, "{when} ")?;
        match self.code() {
            Code::Read => write!(f, "READ {star}{:?} {} bytes", self.target(), self.len())?,
            Code::Write => write!(f, "WRITE {star}{:?} {} bytes", self.target(), self.len())?,
            Code::Allocate => write!(f, "ALLOCATE list {} {} bytes", self.target().raw(), self.len())?,
            Code::Cas => {
                let mode = crate::op::Mode::from_u8(self.mode());
                write!(f, "CAS{} {star}{:?} {mode:?}", self.width(), self.target())?;
            }
            Code::FetchAdd => write!(f, "FETCH-ADD {:?}", self.target())?,
            Code::Retire => write!(f, "RETIRE {} buffers", self.len() / 8)?,
        }
        if self.has(flag::BOUNDED) {
            write!(f, " bounded")?;
        }
        if self.has(flag::MASKED) {
            write!(f, " masked")?;
        }
        if let Some(offset) = self.reclaims() {
            write!(f, " reclaiming +{offset}")?;
        }
        if self.is_fenced() {
            write!(f, " fenced")?;
        }
        if let Some(source) = self.source() {
            write!(f, " from {source:?}")?;
        }
        if let Some(to) = self.redirect() {
            write!(f, " -> {to:?}")?;
        }
        Ok(())
    }
}

/// The bytes of a payload, as an iterator over its contiguous pieces.
#[derive(Clone)]
pub(crate) struct Payload<'a> {
    bytes: &'a [u8],
    at: usize,
    parts: &'a [Option<Part<'a>>],
}

impl<'a> Iterator for Payload<'a> {
    type Item = &'a [u8];

    #[inline]
    fn next(&mut self) -> Option<&'a [u8]> {
        match self.parts.split_first() {
            Some((Some(part), rest)) if part.at as usize == self.at => {
                self.parts = rest;
                Some(part.bytes)
            }
            next => {
                let next = next.and_then(|(part, _)| part.as_ref());
                let inline = next.map_or(self.bytes.len(), |part| part.at as usize - self.at);
                if inline == 0 {
                    return None;
                }
                let (piece, rest) = self.bytes.split_at(inline);
                self.bytes = rest;
                self.at += inline;
                Some(piece)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{self, ListId, Mode};

    const KEY: Key = Key::new(3, 0xfeed);

    #[test]
    fn decode_returns_the_built_chain_with_its_parts_in_place() {
        let large = vec![7u8; 1000];
        let larger = vec![8u8; 2000];
        let mut buf = ChainBuf::new();
        let mut chain = buf.begin(KEY);
        let old = [1u64, 2];
        let new = [3u64, 4];
        let _ = chain.also(op::write(Addr::scratch(8), b"abc"));
        let _ = chain.then(op::allocate(ListId(5), [b"head", &large, b""]).redirect(Addr::scratch(0)));
        let _ = chain.then(op::allocate(ListId(6), [&larger, b"mid", &large]));
        let _ = chain.then(op::cas(Mode::Lt, Addr::new(64), &old, &new).masked(&old, &new));
        let _ = chain.also(op::read(Addr::scratch(0), 8));
        let mut wire = Vec::new();
        chain.write_to(&mut wire);
        wire.extend_from_slice(b"next");
        let (view, rest) = ChainView::decode(&wire).expect("a built chain is well-formed");
        assert_eq!(rest, b"next");
        assert_eq!((view.len(), view.allocates()), (5, 2));
        let flat = |ops: Ops<'_>| -> Vec<(Code, u64, Vec<u8>)> {
            ops.map(|op| (op.code(), op.len(), op.payload().flatten().copied().collect())).collect()
        };
        assert_eq!(flat(view.ops()), flat(chain.view().ops()));
        assert_eq!(flat(view.ops())[2].2, [&larger[..], b"mid", &large].concat());
    }

    #[test]
    fn a_truncated_chain_is_refused_at_every_length() {
        let mut buf = ChainBuf::new();
        let mut chain = buf.begin(KEY);
        let _ = chain.also(op::write(Addr::new(64), b"0123456789"));
        let _ = chain.then(op::read(Addr::new(64), 100));
        let mut wire = Vec::new();
        chain.write_to(&mut wire);
        for cut in 0..wire.len() {
            assert!(ChainView::decode(&wire[..cut]).is_err(), "cut at {cut} of {}", wire.len());
        }
    }

    #[test]
    fn each_malformed_header_fails_with_its_own_error() {
        let mut buf = ChainBuf::new();
        let mut chain = buf.begin(KEY);
        let _ = chain.also(op::read(Addr::new(64), 100));
        let mut good = Vec::new();
        chain.write_to(&mut good);
        let broken = |at: usize, byte: u8| {
            let mut wire = good.clone();
            wire[at] = byte;
            ChainView::decode(&wire).err()
        };
        assert_eq!(broken(16, 2), Some(WireError::OpCount(1)));
        assert_eq!(broken(18, 1), Some(WireError::AllocateCount(0)));
        assert_eq!(broken(20, 1), Some(WireError::AtomicCount(0)));
        assert_eq!(broken(22, 1), Some(WireError::Reserved));
        assert_eq!(broken(24, 99), Some(WireError::UnknownOp(99)));
        assert!(matches!(broken(25, 0x80), Some(WireError::Flags { .. })));
        assert_eq!(broken(25, flag::BOUNDED), Some(WireError::BoundedButDirect));
        assert_eq!(broken(26, 1), Some(WireError::Mode(1)));
        assert_eq!(broken(26, FENCED), None);
        assert_eq!(broken(26, FENCED | 1), Some(WireError::Mode(FENCED | 1)));
        assert_eq!(broken(27, 8), Some(WireError::Width(8)));
        assert_eq!(broken(31, 1), None, "a READ may request more than the reply holds");
        assert_eq!(broken(15, 1), Some(WireError::TooLong { bytes: 16 + (1 << 24) }));
    }

    #[test]
    fn a_reclaiming_cas_is_refused_if_its_pointer_exceeds_the_word() {
        let mut buf = ChainBuf::new();
        for width in [8, 16, 24, 32] {
            let mut chain = buf.begin(KEY);
            match width {
                8 => {
                    let _ = chain.also(op::cas(Mode::Eq, Addr::new(64), &[0u8; 8], &[0u8; 8]).reclaiming(0));
                }
                16 => {
                    let _ =
                        chain.also(op::cas(Mode::Eq, Addr::new(64), &[0u8; 16], &[0u8; 16]).reclaiming(8));
                }
                24 => {
                    let _ =
                        chain.also(op::cas(Mode::Eq, Addr::new(64), &[0u8; 24], &[0u8; 24]).reclaiming(3));
                }
                _ => {
                    let _ =
                        chain.also(op::cas(Mode::Eq, Addr::new(64), &[0u8; 32], &[0u8; 32]).reclaiming(9));
                }
            };
            let mut wire = Vec::new();
            chain.write_to(&mut wire);
            for offset in (0..64).chain([u32::MAX - 7, u32::MAX]) {
                wire[28..32].copy_from_slice(&offset.to_le_bytes());
                let refused = ChainView::decode(&wire).err();
                let is_in_word = u64::from(offset) + 8 <= width;
                assert_eq!(refused.is_none(), is_in_word, "byte {offset} of {width}: {refused:?}");
            }
            // Without the flag, no pointer offset is allowed.
            wire[25] &= !flag::RECLAIMING;
            wire[28..32].copy_from_slice(&1u32.to_le_bytes());
            assert_eq!(ChainView::decode(&wire).err(), Some(WireError::TooLong { bytes: 1 }));
        }
    }

    #[test]
    fn the_reclaiming_flag_is_refused_on_any_op_but_cas() {
        let mut buf = ChainBuf::new();
        let (addend, garbage) = (1.into(), [Addr::new(64)]);
        for code in [Code::Read, Code::Write, Code::Allocate, Code::FetchAdd, Code::Retire] {
            let mut chain = buf.begin(KEY);
            match code {
                Code::Read => {
                    let _ = chain.also(op::read(Addr::new(64), 8));
                }
                Code::Write => {
                    let _ = chain.also(op::write(Addr::new(64), b"12345678"));
                }
                Code::Allocate => {
                    let _ = chain.also(op::allocate(ListId(5), [b"12345678", b"", b""]));
                }
                Code::FetchAdd => {
                    let _ = chain.also(op::fetch_add(Addr::new(64), &addend));
                }
                _ => {
                    let _ = chain.also(op::retire(&garbage));
                }
            }
            let mut wire = Vec::new();
            chain.write_to(&mut wire);
            assert!(ChainView::decode(&wire).is_ok());
            wire[25] |= flag::RECLAIMING;
            assert!(matches!(ChainView::decode(&wire).err(), Some(WireError::Flags { .. })), "{code:?}");
        }
    }

    #[test]
    fn only_the_verbs_of_a_nic_may_be_fenced() {
        let mut buf = ChainBuf::new();
        let (addend, garbage) = (1.into(), [Addr::new(64)]);
        for code in [Code::Read, Code::Write, Code::Allocate, Code::Cas, Code::FetchAdd, Code::Retire] {
            let mut chain = buf.begin(KEY);
            match code {
                Code::Read => _ = chain.also(op::read(Addr::new(64), 8).fenced()),
                Code::Write => _ = chain.also(op::write(Addr::new(64), b"12345678").fenced()),
                Code::Allocate => _ = chain.also(op::allocate(ListId(5), [b"12345678", b"", b""])),
                Code::Cas => _ = chain.also(op::cas(Mode::Ge, Addr::new(64), &1u64, &2u64).fenced()),
                Code::FetchAdd => _ = chain.also(op::fetch_add(Addr::new(64), &addend).fenced()),
                Code::Retire => _ = chain.also(op::retire(&garbage)),
            }
            let mut wire = Vec::new();
            chain.write_to(&mut wire);
            let first = |wire: &[u8]| {
                let (view, _) = ChainView::decode(wire).ok()?;
                let op = view.ops().next().expect("one op");
                Some((op.is_fenced(), op.mode(), op.to_string()))
            };
            let (is_fenced, mode, text) = first(&wire).expect("a built chain is well-formed");
            assert_eq!(is_fenced, code.may_be_fenced(), "{code:?}");
            assert_eq!(text.ends_with(" fenced"), is_fenced, "{text}");
            assert_eq!(mode, if code == Code::Cas { Mode::Ge as u8 } else { 0 });
            wire[26] |= FENCED;
            assert_eq!(first(&wire).is_some(), code.may_be_fenced(), "{code:?}");
        }
    }

    #[test]
    fn a_malformed_retire_is_refused() {
        let mut buf = ChainBuf::new();
        let garbage = [Addr::new(64), Addr::new(128)];
        let mut chain = buf.begin(KEY);
        let _ = chain.also(op::retire(&garbage));
        let mut good = Vec::new();
        chain.write_to(&mut good);
        assert!(ChainView::decode(&good).is_ok());
        let broken = |at: usize, byte: u8| {
            let mut wire = good.clone();
            wire[at] = byte;
            ChainView::decode(&wire).err()
        };
        for is_for in [flag::TARGET_INDIRECT, flag::DATA_INDIRECT, flag::REDIRECT, flag::COMPARE] {
            assert!(matches!(broken(25, is_for), Some(WireError::Flags { .. })));
        }
        assert_eq!(broken(25, flag::CONDITIONAL), None);
        assert_eq!(broken(26, 1), Some(WireError::Mode(1)));
        assert_eq!(broken(27, 8), Some(WireError::Width(8)));
        assert_eq!(broken(32, 1), Some(WireError::Reserved));
        for bytes in (0..16).chain([8 * 1024 + 8]) {
            let mut wire = good[..40].to_vec();
            wire.resize(40 + bytes, 0);
            wire[12..16].copy_from_slice(&(16 + bytes as u32).to_le_bytes());
            wire[28..32].copy_from_slice(&(bytes as u32).to_le_bytes());
            let is_list = bytes % 8 == 0 && bytes <= 8 * 1024;
            let expected = (!is_list).then_some(WireError::Retired { bytes });
            assert_eq!(ChainView::decode(&wire).err(), expected, "{bytes} bytes");
        }
    }

    #[test]
    fn a_large_retire_list_is_borrowed_as_one_piece() {
        let buffers: Vec<Addr> = (1..=1024).map(|n| Addr::new(n * 64)).collect();
        let mut buf = ChainBuf::new();
        let mut chain = buf.begin(KEY);
        let _ = chain.also(op::write(Addr::scratch(0), b"before"));
        let _ = chain.then(op::retire(&buffers));
        let view = chain.view();
        assert!(view.two_pieces().is_none());
        let retired = view.ops().nth(1).expect("two ops");
        assert_eq!(retired.payload().collect::<Vec<_>>(), [buffers.as_bytes()]);
        assert_eq!(retired.to_string(), "then RETIRE 1024 buffers");
    }

    #[test]
    fn only_words_of_8_16_24_and_32_bytes_are_accepted() {
        let mut buf = ChainBuf::new();
        let mut chain = buf.begin(KEY);
        let _ = chain.also(op::cas(Mode::Eq, Addr::new(64), &[0u8; 32], &[0u8; 32]));
        let mut wire = Vec::new();
        chain.write_to(&mut wire);
        for width in 0..=u8::MAX {
            // Resize the payload to two operands of this width, so that only the width can be wrong.
            wire.resize(CHAIN_HEADER + OP_HEADER + 2 * usize::from(width), 0);
            let bytes = (wire.len() - CHAIN_HEADER) as u32;
            wire[12..16].copy_from_slice(&bytes.to_le_bytes());
            wire[27] = width;
            let refused = ChainView::decode(&wire).err();
            let expected = (!matches!(width, 8 | 16 | 24 | 32)).then_some(WireError::Width(width));
            assert_eq!(refused, expected, "width {width}");
        }
    }
}
