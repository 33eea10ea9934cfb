//! The outcome of a chain: a status and an output per op, in one reusable buffer.
//!
//! Invariant: every op of the chain has an entry, and the ends of the outputs never decrease.

use crate::arena::reuse::Retirees;
use crate::chain::Out;
use crate::wire::{REPLY_BYTES_MAX, WireError};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// Outcome of one op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// The op succeeded.
    Ok = 0,
    /// The comparison of a CAS did not hold: nothing was stored; the output is the old value.
    CasFailed = 1,
    /// The op is conditional and the previous op was not successful: it did not run.
    Skipped = 2,
    /// An earlier op of the chain was refused: this op did not run.
    Aborted = 3,
    /// Receiver not ready: no buffer was free for an ALLOCATE. *No op of the chain ran.* Back off and retry.
    NotReady = 4,
    /// The key has no right to the memory that the op accesses. The op did nothing; the rest of the chain was aborted.
    Access = 5,
    /// The op accessed memory through a null pointer. The op did nothing.
    NullPointer = 6,
    /// The op's address is misaligned, its data does not fit into a buffer of the free list that it names, or it cannot
    /// be used at that address. The op did nothing; the rest of the chain was aborted.
    Invalid = 7,
    /// The output of a READ does not fit into the rest of the reply. The op did nothing.
    TooLong = 8,
}

impl Status {
    /// All statuses.
    pub const ALL: [Status; 9] = [
        Status::Ok,
        Status::CasFailed,
        Status::Skipped,
        Status::Aborted,
        Status::NotReady,
        Status::Access,
        Status::NullPointer,
        Status::Invalid,
        Status::TooLong,
    ];

    #[inline(always)]
    fn from_u8(byte: u8) -> Option<Status> {
        Status::ALL.get(byte as usize).copied()
    }

    /// Whether this status aborts the chain's later ops, as a NAK breaks a reliable connection of RDMA.
    #[inline]
    pub const fn aborts(self) -> bool {
        matches!(self, Status::Access | Status::Invalid)
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Status::Ok => "done",
            Status::CasFailed => "the comparison did not hold",
            Status::Skipped => "skipped, since the op before it was not successful",
            Status::Aborted => "aborted, since an earlier op was refused",
            Status::NotReady => "no buffer was free; nothing ran",
            Status::Access => "the key does not open that memory",
            Status::NullPointer => "the pointer was null",
            Status::Invalid => "misaligned, or too long for the list's buffers",
            Status::TooLong => "the output does not fit the reply",
        })
    }
}

/// Size of one op's entry in bytes. The entry is `| status u8 | 0 u8 x 3 | end u32 |`.
const ENTRY: usize = 8;

/// A reply in wire form. Its buffer is reusable: it grows to the size of the longest reply and never shrinks.
#[derive(Default)]
pub struct Reply {
    /// Entries, then outputs. Only the first `used` bytes belong to this reply.
    bytes: Vec<u8>,
    used: usize,
    ops: usize,
    /// Status of the last op, if there is one.
    last: Option<Status>,
    /// Number of buffers that the chain has retired. Known only to the code that ran the chain: not part of the wire
    /// form.
    retired: u32,
    /// Number of these buffers that wait for the node.
    retired_for_node: u32,
}

impl Reply {
    /// An empty reply: it has no statuses until the reply of a chain is stored in it.
    pub const fn new() -> Reply {
        Reply { bytes: Vec::new(), used: 0, ops: 0, last: None, retired: 0, retired_for_node: 0 }
    }

    /// The status of the op of `out`.
    ///
    /// # Panics
    /// If `out` is from another, longer chain.
    #[inline]
    pub fn status<T: ?Sized>(&self, out: Out<T>) -> Status {
        self.entry(out.index as usize).0
    }

    /// The output of the op of `out`. For CAS the output is the old value, whether the CAS swapped or not.
    ///
    /// # Errors
    /// The op's status if the op has no output; [`Status::TooLong`] if the size of the output is not that of a `T`.
    ///
    /// # Panics
    /// If `out` is from another, longer chain.
    #[inline(always)]
    pub fn get<T>(&self, out: Out<T>) -> Result<&T, Status>
    where
        T: ?Sized + FromBytes + KnownLayout + Immutable + Unaligned,
    {
        let (status, start, end) = self.entry(out.index as usize);
        match status {
            Status::Ok | Status::CasFailed => {
                T::ref_from_bytes(&self.bytes[start..end]).map_err(|_| Status::TooLong)
            }
            refused => Err(refused),
        }
    }

    /// The first status of an op that is neither [`Status::Ok`] nor [`Status::CasFailed`], or [`Status::Ok`] if no op
    /// has one.
    #[inline]
    pub fn verdict(&self) -> Status {
        (0..self.ops)
            .map(|index| self.entry(index).0)
            .find(|status| !matches!(status, Status::Ok | Status::CasFailed))
            .unwrap_or(Status::Ok)
    }

    /// The status of the last op. If the chain was aborted, this is [`Status::Aborted`] or the refusal itself.
    ///
    /// # Panics
    /// If the reply is empty.
    #[inline(always)]
    pub fn last_status(&self) -> Status {
        self.last.expect("the reply is not empty")
    }

    /// Number of buffers that the chain has retired, for the code that ran it; 0 in a reply that was received.
    #[inline]
    pub fn retired(&self) -> u32 {
        self.retired
    }

    /// Number of buffers that the chain has retired and that the node frees, for the code that ran it. The session
    /// reuses the others itself.
    #[inline]
    pub fn retired_for_node(&self) -> u32 {
        self.retired_for_node
    }

    /// Number of ops of the chain that this reply answers.
    pub fn len(&self) -> usize {
        self.ops
    }

    /// Whether the reply has no statuses, because no chain's reply has been stored in it.
    pub fn is_empty(&self) -> bool {
        self.ops == 0
    }

    /// The status of op `index`, if that op exists.
    pub fn status_at(&self, index: usize) -> Option<Status> {
        (index < self.ops).then(|| self.entry(index).0)
    }

    /// The statuses of all ops, in order.
    pub fn statuses(&self) -> impl Iterator<Item = Status> + '_ {
        (0..self.ops).map(|index| self.entry(index).0)
    }

    /// The output of op `index`, empty if the op has none.
    ///
    /// # Panics
    /// If there is no such op.
    #[inline]
    pub fn output(&self, index: usize) -> &[u8] {
        let (_, start, end) = self.entry(index);
        &self.bytes[start..end]
    }

    /// The reply's wire form.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.used]
    }

    /// Replaces this reply by the wire form `bytes` of a reply to a chain of `ops` ops.
    ///
    /// # Errors
    /// The bytes are not a well-formed reply to `ops` ops. This reply is then empty.
    pub fn decode(&mut self, ops: usize, bytes: &[u8]) -> Result<(), WireError> {
        self.fill(ops, |own| {
            own.clear();
            own.extend_from_slice(bytes);
        })
    }

    /// Like [`Reply::decode`], for a wire form that `fill` writes into this reply's own buffer, without a copy. `fill`
    /// may replace the buffer.
    ///
    /// # Errors
    /// The bytes are not a well-formed reply to `ops` ops. This reply is then empty.
    #[inline]
    pub fn fill(&mut self, ops: usize, fill: impl FnOnce(&mut Vec<u8>)) -> Result<(), WireError> {
        (self.used, self.ops, self.last) = (0, 0, None);
        (self.retired, self.retired_for_node) = (0, 0);
        fill(&mut self.bytes);
        let bytes = &self.bytes[..];
        let entries = ops.checked_mul(ENTRY).filter(|&len| len <= bytes.len());
        let Some(entries) = entries else { return Err(WireError::Truncated) };
        if bytes.len() > REPLY_BYTES_MAX {
            return Err(WireError::TooLong { bytes: bytes.len() });
        }
        let mut last = 0;
        for entry in bytes[..entries].chunks_exact(ENTRY) {
            let end = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]) as usize;
            if Status::from_u8(entry[0]).is_none() || entry[1..4] != [0; 3] || end < last {
                return Err(WireError::Reply);
            }
            last = end;
        }
        if last != bytes.len() - entries {
            return Err(WireError::Reply);
        }
        (self.used, self.ops) = (bytes.len(), ops);
        self.last = ops.checked_sub(1).map(|last| self.entry(last).0);
        Ok(())
    }

    #[inline(always)]
    fn entry(&self, index: usize) -> (Status, usize, usize) {
        if index >= self.ops {
            no_such_op(index, self.ops);
        }
        let base = self.ops * ENTRY;
        let start = if index == 0 { 0 } else { self.end(index - 1) };
        let status = Status::from_u8(self.bytes[index * ENTRY]).expect("statuses are checked on arrival");
        (status, base + start, base + self.end(index))
    }

    #[inline(always)]
    fn end(&self, index: usize) -> usize {
        let at = index * ENTRY + 4;
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().expect("four bytes")) as usize
    }

    // Methods of a runner.

    /// Clears the reply and prepares it for `ops` ops.
    #[inline(always)]
    pub(crate) fn begin(&mut self, ops: usize) {
        self.ops = 0;
        self.last = None;
        (self.retired, self.retired_for_node) = (0, 0);
        self.used = ops * ENTRY;
        self.ensure_len(self.used);
    }

    /// Space for `len` bytes of the next op's output, or `None` if they do not fit.
    #[inline(always)]
    pub(crate) fn output_space(&mut self, len: usize) -> Option<&mut [u8]> {
        let end = self.used.checked_add(len).filter(|&end| end <= REPLY_BYTES_MAX)?;
        self.ensure_len(end);
        self.bytes.get_mut(self.used..end)
    }

    /// Adds the next op's entry, in a reply to `ops` ops in total. The op's output is the `len` bytes that the caller
    /// has stored in [`Reply::output_space`].
    #[inline(always)]
    pub(crate) fn end_op(&mut self, ops: usize, status: Status, len: usize) {
        self.used += len;
        let end = (self.used - ops * ENTRY) as u64;
        let entry = (status as u64) | end << 32;
        let at = self.ops * ENTRY;
        self.bytes[at..at + ENTRY].copy_from_slice(&entry.to_le_bytes());
        self.ops += 1;
        self.last = Some(status);
    }

    /// Counts one more retired buffer, which joined this list.
    #[inline]
    pub(crate) fn count_retired(&mut self, list: Retirees) {
        self.retired += 1;
        self.retired_for_node += u32::from(list == Retirees::Node);
    }

    #[inline(always)]
    fn ensure_len(&mut self, len: usize) {
        if self.bytes.len() < len {
            self.grow(len);
        }
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self, len: usize) {
        self.bytes.resize(len.next_power_of_two().max(1024), 0);
    }
}

#[cold]
#[inline(never)]
fn no_such_op(index: usize, ops: usize) -> ! {
    panic!("the reply has {ops} ops, so no op {index}")
}

impl std::fmt::Debug for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries((0..self.ops).map(|i| (self.entry(i).0, self.output(i).len()))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Reply {
        let mut reply = Reply::new();
        reply.begin(3);
        reply.output_space(5).expect("it fits").copy_from_slice(b"hello");
        reply.end_op(3, Status::Ok, 5);
        reply.end_op(3, Status::Skipped, 0);
        reply.output_space(8).expect("it fits").copy_from_slice(&7u64.to_le_bytes());
        reply.end_op(3, Status::CasFailed, 8);
        reply
    }

    #[test]
    fn a_reply_round_trips_through_its_wire_form() {
        let sent = sample();
        let mut got = Reply::new();
        got.decode(3, sent.as_bytes()).expect("a good reply");
        assert_eq!(got.statuses().collect::<Vec<_>>(), [Status::Ok, Status::Skipped, Status::CasFailed]);
        assert_eq!((got.output(0), got.output(1)), (&b"hello"[..], &b""[..]));
        assert_eq!(got.verdict(), Status::Skipped);
    }

    #[test]
    fn a_corrupt_or_truncated_reply_never_panics() {
        let sent = sample();
        let mut got = Reply::new();
        for cut in 0..sent.as_bytes().len() {
            assert!(got.decode(3, &sent.as_bytes()[..cut]).is_err());
        }
        for at in 0..24 {
            for byte in 0..=255 {
                let mut bytes = sent.as_bytes().to_vec();
                bytes[at] = byte;
                if got.decode(3, &bytes).is_ok() {
                    (0..3).for_each(|i| drop(got.output(i).to_vec()));
                }
            }
        }
        assert!(got.decode(usize::MAX, sent.as_bytes()).is_err());
    }
}
