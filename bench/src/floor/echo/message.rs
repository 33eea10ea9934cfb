//! The bytes of requests and replies, the same on every medium.
//!
//! Invariant: sizes follow from the kinds of the operations, so a message needs no length fields. A client knows the
//! kinds of the replies, because they come in the order of their requests.

use std::io;

use super::TASKS_MAX;
use crate::floor::overwrite::Values;

/// Size of a request in bytes: | id u64 | key number u64 | op u32 | together u32 |, in the host's byte order. The value
/// of an overwrite follows, filled up to a multiple of 8 bytes.
pub(super) const REQUEST_SIZE: usize = 24;
pub(super) const NUMBER: usize = 8;
pub(super) const OP: usize = 16;
/// Offset of the field `together` of a request: the number of requests published together, in the first of these
/// requests. Only a ring uses this field.
pub(super) const REQUEST_TOGETHER: usize = 20;

/// Size in bytes of a reply's part after the item. Reply: | item | 0.. | found u32 | together u32 | id u64 |, a
/// multiple of 8 bytes. The reply to an overwrite has no item. The id, which publishes the reply, is last, so that the
/// cache line that the client polls is written once.
pub(super) const TRAILER_SIZE: usize = 16;

/// Maximum number of bytes of replies in a message: the limit of a datagram over IPv4.
pub(super) const REPLY_SIZE_MAX: usize = 65_507;

/// Op of a request whose reply has the key's item.
pub(super) const FETCH: u32 = 1;
/// Op of a request in a bare echo, whose reply has one fixed item.
pub(super) const ECHO: u32 = 2;
/// Flag of an op that overwrites the key's item by the value in the request. The reply has no item.
pub(super) const OVERWRITE: u32 = 4;

/// Id of the first request. No request has id 0.
pub(super) const FIRST_ID: u64 = 1;

const _: () = assert!(REQUEST_TOGETHER + size_of::<u32>() == REQUEST_SIZE);

const _: () = assert!(TASKS_MAX == u64::BITS as usize);

/// Returns the size in bytes of a reply with an item of `item_size` bytes.
pub(super) const fn reply_size(item_size: usize) -> usize {
    item_size.next_multiple_of(8) + TRAILER_SIZE
}

/// Ops and sizes of an echo's messages. Kinds are bits: bit i states whether request i of a message is an overwrite.
#[derive(Clone, Copy)]
pub(super) struct Format {
    /// Op of each request, without its flag.
    pub(super) op: u32,
    /// Whether requests may have the flag [`OVERWRITE`].
    pub(super) has_overwrites: bool,
    pub(super) item_size: usize,
    pub(super) value_size: usize,
}

impl Format {
    /// Returns the offset in a message of request `index`, or of the end of `index` requests.
    #[inline(always)]
    pub(super) fn request_at(&self, kinds: u64, index: usize) -> usize {
        index * REQUEST_SIZE + ones_below(kinds, index) * self.value_size.next_multiple_of(8)
    }

    /// Returns the offset in a message of reply `index`, or of the end of `index` replies.
    #[inline(always)]
    pub(super) fn reply_at(&self, kinds: u64, index: usize) -> usize {
        index * TRAILER_SIZE + ones_below(!kinds, index) * self.item_size.next_multiple_of(8)
    }

    /// Returns the size in bytes of the longest message of `count` requests.
    pub(super) fn requests_size_max(&self, count: usize) -> usize {
        self.request_at(if self.has_overwrites { u64::MAX } else { 0 }, count)
    }

    /// Returns the number of replies of these kinds, at most `count`, that are whole in the first `len` bytes.
    #[inline(always)]
    pub(super) fn replies_in(&self, len: usize, kinds: u64, count: usize) -> usize {
        (0..count).take_while(|&index| self.reply_at(kinds, index + 1) <= len).count()
    }
}

/// Returns the number of bits that are set below bit `index`.
#[inline(always)]
fn ones_below(bits: u64, index: usize) -> usize {
    (bits & !u64::MAX.unbounded_shl(index as u32)).count_ones() as usize
}

/// A decoded reply: its id, whether the item was found, and the item of a fetch.
pub(super) struct Reply<'a> {
    pub(super) id: u64,
    pub(super) found: bool,
    pub(super) item: &'a [u8],
}

/// The requests in flight at a client, each at the index of its id modulo [`TASKS_MAX`].
pub(super) struct Asked {
    numbers: [u64; TASKS_MAX],
    /// First byte of each overwrite's value.
    firsts: [u8; TASKS_MAX],
    kinds: u64,
}

impl Asked {
    pub(super) fn new() -> Self {
        Self { numbers: [0; TASKS_MAX], firsts: [0; TASKS_MAX], kinds: 0 }
    }

    /// Enters the request with this id: a fetch, or an overwrite by the value that starts with `first`.
    #[inline(always)]
    pub(super) fn enter(&mut self, id: u64, number: u64, is_overwrite: bool, first: u8) {
        let index = id as usize % TASKS_MAX;
        (self.numbers[index], self.firsts[index]) = (number, first);
        self.kinds = self.kinds & !(1 << index) | u64::from(is_overwrite) << index;
    }

    #[inline(always)]
    pub(super) fn number(&self, id: u64) -> u64 {
        self.numbers[id as usize % TASKS_MAX]
    }

    #[inline(always)]
    pub(super) fn is_overwrite(&self, id: u64) -> bool {
        self.kinds >> (id as usize % TASKS_MAX) & 1 != 0
    }

    /// Returns the value of the overwrite with this id.
    #[inline(always)]
    pub(super) fn value<'a>(&self, id: u64, values: &'a Values) -> &'a [u8] {
        values.starting_with(self.firsts[id as usize % TASKS_MAX])
    }

    /// Returns the kinds of the requests with the ids from `first` on.
    #[inline(always)]
    pub(super) fn kinds_from(&self, first: u64) -> u64 {
        self.kinds.rotate_right((first % u64::from(u64::BITS)) as u32)
    }
}

/// Key numbers and kinds of the requests in a message, and the id of the first request.
pub(super) struct Requests {
    pub(super) first: u64,
    pub(super) kinds: u64,
    numbers: [u64; TASKS_MAX],
    count: usize,
}

impl Requests {
    pub(super) fn new(first: u64) -> Self {
        Self { first, kinds: 0, numbers: [0; TASKS_MAX], count: 0 }
    }

    pub(super) fn numbers(&self) -> &[u64] {
        &self.numbers[..self.count]
    }

    #[inline(always)]
    pub(super) fn is_overwrite(&self, index: usize) -> bool {
        self.kinds >> index & 1 != 0
    }

    /// Adds the request in `bytes` to the message's requests.
    ///
    /// # Errors
    /// The request does not follow the one before, or its op is not one of `format`.
    #[inline(always)]
    pub(super) fn push(&mut self, bytes: &[u8; REQUEST_SIZE], format: &Format) -> io::Result<()> {
        let id = word(bytes, 0);
        if self.count == 0 {
            self.first = id;
        }
        let (asked, is_overwrite) = (op(bytes), is_overwrite(bytes));
        let is_valid = asked & !OVERWRITE == format.op && (format.has_overwrites || !is_overwrite);
        if self.count == TASKS_MAX || id != self.first.wrapping_add(self.count as u64) || !is_valid {
            return Err(no_request(id, asked));
        }
        self.numbers[self.count] = word(bytes, NUMBER);
        self.kinds |= u64::from(is_overwrite) << self.count;
        self.count += 1;
        Ok(())
    }
}

/// Writes the `count` requests of `asked` with the ids from `first` on to the start of `out`. Returns the written
/// bytes.
#[inline(always)]
pub(super) fn write_requests<'out>(
    out: &'out mut [u8],
    format: &Format,
    first: u64,
    count: usize,
    asked: &Asked,
    values: &Values,
) -> &'out [u8] {
    let mut at = 0;
    for id in first..first + count as u64 {
        out[at..at + REQUEST_SIZE].copy_from_slice(&request(id, asked, format.op));
        at += REQUEST_SIZE;
        if asked.is_overwrite(id) {
            out[at..at + format.value_size].copy_from_slice(asked.value(id, values));
            at += format.value_size.next_multiple_of(8);
        }
    }
    &out[..at]
}

/// Encodes one request without its value. Its field `together` is 0; a ring sets the field when it publishes the
/// request.
#[inline(always)]
pub(super) fn request(id: u64, asked: &Asked, op: u32) -> [u8; REQUEST_SIZE] {
    let op = if asked.is_overwrite(id) { op | OVERWRITE } else { op };
    let mut bytes = [0; REQUEST_SIZE];
    bytes[..NUMBER].copy_from_slice(&id.to_ne_bytes());
    bytes[NUMBER..OP].copy_from_slice(&asked.number(id).to_ne_bytes());
    bytes[OP..REQUEST_TOGETHER].copy_from_slice(&op.to_ne_bytes());
    bytes
}

/// Decodes the whole requests at the start of `bytes`, at most `count`.
#[inline(always)]
pub(super) fn read_requests(bytes: &[u8], format: &Format, count: usize) -> io::Result<Requests> {
    let mut requests = Requests::new(0);
    let mut at = 0;
    while requests.count < count
        && let Some(head) = bytes[at..].first_chunk()
    {
        let end = at + format.request_at(u64::from(is_overwrite(head)), 1);
        if end > bytes.len() {
            break;
        }
        requests.push(head, format)?;
        at = end;
    }
    Ok(requests)
}

/// Returns the value of the overwrite `index` in the message of `requests`.
#[inline(always)]
pub(super) fn value_in<'a>(bytes: &'a [u8], format: &Format, requests: &Requests, index: usize) -> &'a [u8] {
    &bytes[format.request_at(requests.kinds, index) + REQUEST_SIZE..][..format.value_size]
}

/// Splits `out` into the items of the replies to `requests`, in order. The item of an overwrite's reply is empty.
#[inline(always)]
pub(super) fn items<'out>(
    mut out: &'out mut [u8],
    format: &Format,
    requests: &Requests,
) -> impl Iterator<Item = &'out mut [u8]> {
    (0..requests.count).map(move |index| {
        let item_size = if requests.is_overwrite(index) { 0 } else { format.item_size };
        let (reply, rest) = std::mem::take(&mut out).split_at_mut(reply_size(item_size));
        out = rest;
        &mut reply[..item_size]
    })
}

/// Completes the replies to `requests` in `out` with their ids. Bit i of `found` states whether the key of request i
/// was found.
#[inline(always)]
pub(super) fn write_trailers(out: &mut [u8], format: &Format, requests: &Requests, found: u64) {
    for (id, index) in (requests.first..).zip(0..requests.count) {
        let trailer = &mut out[..format.reply_at(requests.kinds, index + 1)];
        let trailer = trailer.last_chunk_mut::<TRAILER_SIZE>().expect("a reply has a trailer");
        trailer[..4].copy_from_slice(&((found >> index) as u32 & 1).to_ne_bytes());
        trailer[8..].copy_from_slice(&id.to_ne_bytes());
    }
}

/// Passes `count` replies of these kinds in `bytes` to `each`, in order.
#[inline(always)]
pub(super) fn read_replies(
    bytes: &[u8],
    format: &Format,
    kinds: u64,
    count: usize,
    mut each: impl FnMut(Reply<'_>),
) {
    let mut at = 0;
    for index in 0..count {
        let item_size = if kinds >> index & 1 != 0 { 0 } else { format.item_size };
        let reply = &bytes[at..at + reply_size(item_size)];
        at += reply.len();
        let trailer = &reply[reply.len() - TRAILER_SIZE..];
        each(Reply { id: word(trailer, 8), found: trailer[0] == 1, item: &reply[..item_size] });
    }
}

fn op(bytes: &[u8; REQUEST_SIZE]) -> u32 {
    u32::from_ne_bytes([bytes[OP], bytes[OP + 1], bytes[OP + 2], bytes[OP + 3]])
}

#[inline(always)]
fn is_overwrite(bytes: &[u8; REQUEST_SIZE]) -> bool {
    op(bytes) & OVERWRITE != 0
}

#[inline(always)]
fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(*bytes[at..].first_chunk().expect("a word within the request or trailer"))
}

#[cold]
pub(super) fn no_request(id: u64, op: u32) -> io::Error {
    let wrong =
        format!("invalid request, id {id}, op {op}: the client may have another version or other flags");
    io::Error::new(io::ErrorKind::InvalidData, wrong)
}
