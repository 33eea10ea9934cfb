//! The bytes of a request and of a reply, the same on every medium.
//!
//! Invariant: a message holds whole requests or whole replies of one size, so that it needs no lengths.

use std::io;

use super::TASKS_MAX;

/// request: | id u64 | key number u64 | op u32 | together u32 |, in the host's byte order
pub(super) const REQUEST_SIZE: usize = 24;
pub(super) const NUMBER: usize = 8;
pub(super) const OP: usize = 16;
/// How many requests were published together, in the first of them; only a ring needs it.
pub(super) const REQUEST_TOGETHER: usize = 20;

/// reply: | item | 0.. | found u32 | together u32 | id u64 |, a multiple of 8 bytes. What tells that it is there comes
/// last, as the line that the client looks at is then written once.
pub(super) const TRAILER_SIZE: usize = 16;

/// Most bytes of replies in a message: what a datagram over IPv4 holds.
pub(super) const REPLY_SIZE_MAX: usize = 65_507;

/// What a request asks for.
pub(super) const FETCH: u32 = 1;
/// What a request of a bare echo asks for.
pub(super) const ECHO: u32 = 2;

/// The first request has this id; 0 is nobody's.
pub(super) const FIRST_ID: u64 = 1;

const _: () = assert!(REQUEST_TOGETHER + size_of::<u32>() == REQUEST_SIZE);

/// Bytes of a reply with an item of `item_size` bytes.
pub(super) const fn reply_size(item_size: usize) -> usize {
    item_size.next_multiple_of(8) + TRAILER_SIZE
}

/// A reply as the client sees it.
pub(super) struct Reply<'a> {
    pub(super) id: u64,
    pub(super) found: bool,
    pub(super) item: &'a [u8],
}

/// The key numbers of the requests of a message, and the id of the first.
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

    /// Adds the request in `bytes`, if it follows the one before and asks for `op`.
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

/// Requests for `numbers`, the first of which is `first`, at the beginning of `out`; returns their bytes.
#[inline(always)]
pub(super) fn write_requests<'out>(out: &'out mut [u8], first: u64, numbers: &[u64], op: u32) -> &'out [u8] {
    let len = numbers.len() * REQUEST_SIZE;
    for ((id, &number), bytes) in (first..).zip(numbers).zip(out[..len].chunks_exact_mut(REQUEST_SIZE)) {
        bytes.copy_from_slice(&request(id, number, op));
    }
    &out[..len]
}

/// One request, published with no other.
#[inline(always)]
pub(super) fn request(id: u64, number: u64, op: u32) -> [u8; REQUEST_SIZE] {
    let mut bytes = [0; REQUEST_SIZE];
    bytes[..NUMBER].copy_from_slice(&id.to_ne_bytes());
    bytes[NUMBER..OP].copy_from_slice(&number.to_ne_bytes());
    bytes[OP..REQUEST_TOGETHER].copy_from_slice(&op.to_ne_bytes());
    bytes
}

/// The requests in a message from a socket.
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

/// Completes the replies in `out`, one to each of `requests`; bit i of `found` tells whether the i-th has an item.
#[inline(always)]
pub(super) fn write_trailers(out: &mut [u8], reply_size: usize, first: u64, found: u64) {
    for ((id, index), reply) in (first..).zip(0..).zip(out.chunks_exact_mut(reply_size)) {
        let trailer = &mut reply[reply_size - TRAILER_SIZE..];
        trailer[..4].copy_from_slice(&((found >> index) as u32 & 1).to_ne_bytes());
        trailer[8..].copy_from_slice(&id.to_ne_bytes());
    }
}

/// Hands the replies in `bytes` to `each`, in order; returns how many.
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
    u64::from_ne_bytes(*bytes[at..].first_chunk().expect("a word lies within the request or trailer"))
}

#[cold]
fn no_request(id: u64, op: u32) -> io::Error {
    let wrong = format!(
        "a request that no client sends, id {id}, op {op}: is it of another version or with other flags?"
    );
    io::Error::new(io::ErrorKind::InvalidData, wrong)
}
