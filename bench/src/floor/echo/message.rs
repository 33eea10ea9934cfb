//! The bytes of requests and replies, the same on every medium.
//!
//! Invariant: a message holds whole requests or whole replies of one size, so it needs no length fields.

use std::io;

use super::TASKS_MAX;

/// Size of a request in bytes: | id u64 | key number u64 | op u32 | together u32 |, in the host's byte order
pub(super) const REQUEST_SIZE: usize = 24;
pub(super) const NUMBER: usize = 8;
pub(super) const OP: usize = 16;
/// Offset of the field `together` of a request: the number of requests published together, in the first of these
/// requests. Only a ring uses this field.
pub(super) const REQUEST_TOGETHER: usize = 20;

/// Size in bytes of a reply's part after the item. Reply: | item | 0.. | found u32 | together u32 | id u64 |, a
/// multiple of 8 bytes. The id, which publishes the reply, is last, so that the cache line that the client polls is
/// written once.
pub(super) const TRAILER_SIZE: usize = 16;

/// Maximum number of bytes of replies in a message: the limit of a datagram over IPv4.
pub(super) const REPLY_SIZE_MAX: usize = 65_507;

/// Op of a request whose reply has the key's item.
pub(super) const FETCH: u32 = 1;
/// Op of a request in a bare echo, whose reply has one fixed item.
pub(super) const ECHO: u32 = 2;

/// Id of the first request. No request has id 0.
pub(super) const FIRST_ID: u64 = 1;

const _: () = assert!(REQUEST_TOGETHER + size_of::<u32>() == REQUEST_SIZE);

/// Returns the size in bytes of a reply with an item of `item_size` bytes.
pub(super) const fn reply_size(item_size: usize) -> usize {
    item_size.next_multiple_of(8) + TRAILER_SIZE
}

/// A decoded reply: its id, whether the item was found, and the item.
pub(super) struct Reply<'a> {
    pub(super) id: u64,
    pub(super) found: bool,
    pub(super) item: &'a [u8],
}

/// Key numbers of the requests in a message, and the id of the first request.
pub(super) struct Requests {
    pub(super) first: u64,
    numbers: [u64; TASKS_MAX],
    count: usize,
}

impl Requests {
    pub(super) fn new(first: u64) -> Self {
        Self { first, numbers: [0; TASKS_MAX], count: 0 }
    }

    pub(super) fn numbers(&self) -> &[u64] {
        &self.numbers[..self.count]
    }

    /// Adds the request in `bytes` to the message's requests.
    ///
    /// # Errors
    /// The request does not follow the one before, or its op is not `op`.
    #[inline(always)]
    pub(super) fn push(&mut self, bytes: &[u8; REQUEST_SIZE], op: u32) -> io::Result<()> {
        let id = word(bytes, 0);
        if self.count == 0 {
            self.first = id;
        }
        let asked = u32::from_ne_bytes([bytes[OP], bytes[OP + 1], bytes[OP + 2], bytes[OP + 3]]);
        if self.count == TASKS_MAX || id != self.first.wrapping_add(self.count as u64) || asked != op {
            return Err(no_request(id, asked));
        }
        self.numbers[self.count] = word(bytes, NUMBER);
        self.count += 1;
        Ok(())
    }
}

/// Writes requests for `numbers` to the start of `out`, with ids from `first` on. Returns the written bytes.
#[inline(always)]
pub(super) fn write_requests<'out>(out: &'out mut [u8], first: u64, numbers: &[u64], op: u32) -> &'out [u8] {
    let len = numbers.len() * REQUEST_SIZE;
    for ((id, &number), bytes) in (first..).zip(numbers).zip(out[..len].chunks_exact_mut(REQUEST_SIZE)) {
        bytes.copy_from_slice(&request(id, number, op));
    }
    &out[..len]
}

/// Encodes one request. Its field `together` is 0; a ring sets the field when it publishes the request.
#[inline(always)]
pub(super) fn request(id: u64, number: u64, op: u32) -> [u8; REQUEST_SIZE] {
    let mut bytes = [0; REQUEST_SIZE];
    bytes[..NUMBER].copy_from_slice(&id.to_ne_bytes());
    bytes[NUMBER..OP].copy_from_slice(&number.to_ne_bytes());
    bytes[OP..REQUEST_TOGETHER].copy_from_slice(&op.to_ne_bytes());
    bytes
}

/// Decodes the requests in a message from a socket.
#[inline(always)]
pub(super) fn read_requests(bytes: &[u8], op: u32) -> io::Result<Requests> {
    let mut requests = Requests::new(0);
    let (whole, rest) = bytes.as_chunks::<REQUEST_SIZE>();
    if !rest.is_empty() {
        return Err(no_request(0, 0));
    }
    for bytes in whole {
        requests.push(bytes, op)?;
    }
    Ok(requests)
}

/// Completes the replies in `out` with their ids, from `first` on. Bit i of `found` states whether reply i has an
/// item.
#[inline(always)]
pub(super) fn write_trailers(out: &mut [u8], reply_size: usize, first: u64, found: u64) {
    for ((id, index), reply) in (first..).zip(0..).zip(out.chunks_exact_mut(reply_size)) {
        let trailer = &mut reply[reply_size - TRAILER_SIZE..];
        trailer[..4].copy_from_slice(&((found >> index) as u32 & 1).to_ne_bytes());
        trailer[8..].copy_from_slice(&id.to_ne_bytes());
    }
}

/// Passes the replies in `bytes` to `each`, in order. Returns the number of replies.
#[inline(always)]
pub(super) fn read_replies(
    bytes: &[u8],
    reply_size: usize,
    item_size: usize,
    mut each: impl FnMut(Reply<'_>),
) -> usize {
    let replies = bytes.chunks_exact(reply_size);
    let count = replies.len();
    for reply in replies {
        let trailer = &reply[reply_size - TRAILER_SIZE..];
        each(Reply { id: word(trailer, 8), found: trailer[0] == 1, item: &reply[..item_size] });
    }
    count
}

#[inline(always)]
fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(*bytes[at..].first_chunk().expect("a word within the request or trailer"))
}

#[cold]
fn no_request(id: u64, op: u32) -> io::Error {
    let wrong =
        format!("invalid request, id {id}, op {op}: the client may have another version or other flags");
    io::Error::new(io::ErrorKind::InvalidData, wrong)
}
