//! The wire format of datagrams, and the validation of received bytes.
//!
//! ```text
//! datagram: | magic u16 | version u8 | kind u8 | session u32 | secret u64 | check u64 |         24 bytes, then
//!   HELLO     | identity u128 | incarnation u64 | features u64 | datagram u32 | inbound u32 | token bytes u32 |
//!             | 0 u32 | token, zeros up to 1200
//!   WELCOME   | secret u64 | node u64 | features u64 | session u32 | datagram u32 | credit u32 | assembly u32 |
//!             | silence ms u32 | window u8 | eager u8 | 0 u16 |
//!   REFUSED   the reason, as UTF-8
//!   DATA      entries
//!   GONE      | slots u32 | 1 if the client was fenced, or 0 u32 | { number u32 | state u32 } per slot |
//!   PING, PONG, BYE   no body
//! entry:    | kind u8 | slot u8 | index u8 | count u8 | number u32 | len u32 | size u32 |       16 bytes, then
//!           `len` bytes of payload and zeros up to a multiple of 8
//!   CHAIN, CALL, RETIRE, REPLY   fragment `index` of `count` of a message of `size` bytes
//!   HAVE      | have u64 | want u64 |: the fragments that have arrived, and those requested (of a reply)
//!   CANCEL    no payload: this number must not run, unless it has run already
//!   A RETIRE has { region u32 | 0 u32 | address u64 } per buffer
//! ```
//!
//! All numbers are little-endian. `check` is a hash of all other bytes. UDP's own 16-bit checksum would miss one
//! damaged datagram in 65536, and an entry with a damaged slot or number would belong to another request. Over a
//! reliable carrier `check` is 0, and ignored.
//!
//! In HELLO, WELCOME and REFUSED the header's secret is a nonce that the client has chosen. Only parties that have seen
//! the HELLO know this nonce.
//!
//! Invariant: every fragment but the last has [`chunk`] bytes. So `size` alone determines the number of fragments, and
//! the position and length of each.
//! Invariant: whatever `Datagram::decode` and `Entries::validate` accept is well-formed to its last byte.
//! Invariant: the header's magic, version, kind and secret, and the whole HELLO and REFUSED, have the same layout in
//! all versions, so that two versions can report the mismatch to each other.

use super::{DATAGRAM_MIN, FRAGMENTS_MAX, MESSAGE_BYTES_MAX, WINDOW_MAX};
use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First two bytes of every datagram: "Fs".
pub const MAGIC: u16 = u16::from_le_bytes(*b"Fs");
/// Version of the wire format.
pub const VERSION: u8 = 2;

/// Kind of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A client requests a session.
    Hello = 1,
    /// The server grants the session.
    Welcome = 2,
    /// The server refuses the session, with a reason.
    Refused = 3,
    /// Entries of a session. Both sides send them.
    Data = 4,
    /// Question whether the peer is alive.
    Ping = 5,
    /// Response to a PING: the sender is alive.
    Pong = 6,
    /// The client ends its session.
    Bye = 7,
    /// The session does not exist, or has ended.
    Gone = 8,
}

impl Kind {
    const ALL: [Kind; 8] = [
        Kind::Hello,
        Kind::Welcome,
        Kind::Refused,
        Kind::Data,
        Kind::Ping,
        Kind::Pong,
        Kind::Bye,
        Kind::Gone,
    ];
}

/// Kind of an entry in a DATA datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum EntryKind {
    /// Part of a request to run a chain.
    Chain = 1,
    /// Part of a request to a service.
    Call = 2,
    /// A fragment of a call.
    Retire = 3,
    /// Part of the response to a CHAIN, CALL or RETIRE.
    Reply = 4,
    /// Report of the fragments that have arrived, and request for missing ones.
    Have = 5,
    /// Request not to run a request that the client no longer wants.
    Cancel = 6,
}

impl EntryKind {
    const ALL: [EntryKind; 6] = [
        EntryKind::Chain,
        EntryKind::Call,
        EntryKind::Retire,
        EntryKind::Reply,
        EntryKind::Have,
        EntryKind::Cancel,
    ];
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Header {
    magic: U16,
    version: u8,
    kind: u8,
    session: U32,
    secret: U64,
    check: U64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct EntryHeader {
    kind: u8,
    slot: u8,
    index: u8,
    count: u8,
    number: U32,
    len: U32,
    size: U32,
}

/// The body of a HELLO before its token.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct HelloBytes {
    pub(super) identity: U128,
    pub(super) incarnation: U64,
    pub(super) features: U64,
    pub(super) datagram: U32,
    pub(super) inbound: U32,
    pub(super) token: U32,
    pub(super) reserved: U32,
}

/// The body of a WELCOME.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct WelcomeBytes {
    pub(super) secret: U64,
    pub(super) node: U64,
    pub(super) features: U64,
    pub(super) session: U32,
    pub(super) datagram: U32,
    pub(super) credit: U32,
    pub(super) assembly: U32,
    pub(super) silence_ms: U32,
    pub(super) window: u8,
    pub(super) eager: u8,
    pub(super) reserved: U16,
}

/// The state of one slot in a GONE.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct LastBytes {
    pub(super) number: U32,
    pub(super) state: U32,
}

/// Payload of a HAVE entry.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct HaveBytes {
    pub(super) have: U64,
    pub(super) want: U64,
}

/// Size of a datagram's header in bytes.
pub const HEADER: usize = size_of::<Header>();
/// Size of an entry's header in bytes.
pub const ENTRY: usize = size_of::<EntryHeader>();
/// Size of the prefix of a call's request, `| service u32 | 0 u32 |`, and of every reply, `| execution u64 |`.
pub(super) const PREFIX: usize = 8;
/// Size of one buffer in a RETIRE: `| region u32 | 0 u32 | address u64 |`.
pub(super) const RETIRED: usize = 16;
const CHECK_AT: usize = HEADER - size_of::<u64>();
const _: () = assert!(HEADER == 24 && ENTRY == 16);
const _: () =
    assert!(chunk(DATAGRAM_MIN) * FRAGMENTS_MAX >= MESSAGE_BYTES_MAX, "all fragments fit in the bitmap");

/// Returns the size of every fragment but the last, in datagrams of at most `datagram` bytes.
pub const fn chunk(datagram: usize) -> usize {
    (datagram - HEADER - ENTRY) & !7
}

/// Returns the number of fragments of a message of `size` bytes, each with at most `chunk` bytes.
#[inline]
pub const fn fragments(size: usize, chunk: usize) -> usize {
    // Most messages have one fragment, so a comparison replaces the slower division.
    if size <= chunk { 1 } else { size.div_ceil(chunk) }
}

/// Returns the bitmap of all fragments of a message that has `count` of them.
#[inline]
pub(super) const fn all(count: usize) -> u64 {
    if count >= 64 { u64::MAX } else { (1 << count) - 1 }
}

/// Returns the offset and the length of fragment `index` in a message of `size` bytes.
#[inline]
pub(super) fn extent(size: usize, chunk: usize, index: usize) -> (usize, usize) {
    let at = index * chunk;
    (at, chunk.min(size - at))
}

/// Returns the number of bytes that a fragment of `len` bytes takes in a datagram.
#[inline]
pub(super) const fn footprint(len: usize) -> usize {
    ENTRY + len.next_multiple_of(8)
}

/// Reason for which a datagram was rejected. A rejected datagram has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketError {
    /// The datagram begins with this number instead of [`MAGIC`].
    Magic(u16),
    /// The datagram has this version, and not [`VERSION`].
    Version(u8),
    /// The datagram has this kind, which is unknown or not valid in this direction.
    Kind(u8),
    /// The datagram is too short or too long.
    Length,
    /// The datagram is damaged: its checksum is wrong.
    Check,
    /// The field with this name has an invalid value.
    Field(&'static str),
    /// The datagram does not contain the session's secret.
    Secret,
    /// The datagram names the session with this number, which does not exist.
    Session(u32),
}

impl std::fmt::Display for PacketError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PacketError::Magic(magic) => {
                write!(f, "a datagram begins with {magic:#06x} instead of {MAGIC:#06x}")
            }
            PacketError::Version(version) => {
                write!(f, "a datagram has version {version} instead of {VERSION}")
            }
            PacketError::Kind(kind) => {
                write!(f, "a datagram has kind {kind}, which is invalid in this direction")
            }
            PacketError::Length => f.write_str("a datagram's length is wrong"),
            PacketError::Check => f.write_str("a datagram was damaged in transit"),
            PacketError::Field(field) => write!(f, "a datagram's {field} is invalid"),
            PacketError::Secret => f.write_str("a datagram has the wrong secret"),
            PacketError::Session(session) => write!(f, "session {session} does not exist"),
        }
    }
}

impl std::error::Error for PacketError {}

/// A datagram with a valid header.
pub(super) struct Datagram<'a> {
    pub(super) kind: Kind,
    pub(super) session: u32,
    pub(super) secret: u64,
    pub(super) body: &'a [u8],
}

/// The fields of a datagram that are common to all versions.
pub(super) struct Foreign {
    pub(super) version: u8,
    pub(super) kind: u8,
    pub(super) secret: u64,
}

impl<'a> Datagram<'a> {
    #[inline]
    pub(super) fn decode(bytes: &'a [u8], is_reliable: bool) -> Result<Datagram<'a>, PacketError> {
        let (header, body) = Header::ref_from_prefix(bytes).map_err(|_| PacketError::Length)?;
        if header.magic.get() != MAGIC {
            return Err(PacketError::Magic(header.magic.get()));
        }
        if header.version != VERSION {
            return Err(PacketError::Version(header.version));
        }
        if !is_reliable && header.check.get() != check(bytes) {
            return Err(PacketError::Check);
        }
        let kind = Kind::ALL.get(usize::from(header.kind).wrapping_sub(1)).copied();
        let kind = kind.ok_or(PacketError::Kind(header.kind))?;
        Ok(Datagram { kind, session: header.session.get(), secret: header.secret.get(), body })
    }
}

impl Foreign {
    /// Decodes the fields common to all versions.
    pub(super) fn decode(bytes: &[u8]) -> Option<Foreign> {
        let (header, _) = Header::ref_from_prefix(bytes).ok()?;
        let foreign = Foreign { version: header.version, kind: header.kind, secret: header.secret.get() };
        (header.magic.get() == MAGIC).then_some(foreign)
    }
}

/// The fields of a HELLO that a carrier needs to refuse the HELLO.
pub(crate) struct Greeting {
    pub(crate) nonce: u64,
    pub(crate) shows_token: bool,
}

/// Decodes a HELLO. Returns `None` for any other datagram, and for one that is too short to get a response.
pub(crate) fn greeting(bytes: &[u8]) -> Option<Greeting> {
    let (header, body) = Header::ref_from_prefix(bytes).ok()?;
    let (hello, _) = HelloBytes::ref_from_prefix(body).ok()?;
    let is_hello = is(bytes, Kind::Hello) && bytes.len() >= DATAGRAM_MIN;
    is_hello.then_some(Greeting { nonce: header.secret.get(), shows_token: hello.token.get() != 0 })
}

/// Whether the header of a datagram claims this kind.
pub fn is(bytes: &[u8], kind: Kind) -> bool {
    Header::ref_from_prefix(bytes)
        .is_ok_and(|(header, _)| header.magic.get() == MAGIC && header.kind == kind as u8)
}

/// Describes the content of a datagram in words: `chain 3/17` is the request to run a chain with number 17 in slot 3,
/// and `reply 3/17` is its reply.
pub fn describe(bytes: &[u8]) -> String {
    let Ok((header, body)) = Header::ref_from_prefix(bytes) else { return "no farside datagram".to_owned() };
    let kind = Kind::ALL.get(usize::from(header.kind).wrapping_sub(1)).copied();
    match kind.filter(|_| header.magic.get() == MAGIC) {
        None => "no farside datagram".to_owned(),
        Some(Kind::Data) => {
            let entries = Entries { rest: body }.map(|entry| {
                let Entry { kind, slot, number, index, count, .. } = entry;
                let part = if count > 1 { format!(" part {} of {count}", index + 1) } else { String::new() };
                format!("{} {slot}/{number}{part}", format!("{kind:?}").to_lowercase())
            });
            entries.collect::<Vec<_>>().join(", ")
        }
        Some(kind) => format!("{kind:?}").to_lowercase(),
    }
}

/// Begins a datagram in `out`, replacing its content. [`seal`] completes it, unless the carrier is reliable.
pub(super) fn begin(out: &mut Vec<u8>, kind: Kind, session: u32, secret: u64) {
    let header = Header {
        magic: U16::new(MAGIC),
        version: VERSION,
        kind: kind as u8,
        session: U32::new(session),
        secret: U64::new(secret),
        check: U64::ZERO,
    };
    out.clear();
    out.extend_from_slice(header.as_bytes());
}

/// Completes the datagram in `out` with its checksum.
pub(super) fn seal(out: &mut [u8]) {
    let check = check(out);
    out[CHECK_AT..HEADER].copy_from_slice(&check.to_le_bytes());
}

fn check(bytes: &[u8]) -> u64 {
    static SECRETS: RapidSecrets = RapidSecrets::seed(0x6661_7273_6964_6501);
    let body = rapidhash_v3_seeded(&bytes[HEADER..], &SECRETS);
    let mut head = [0; HEADER];
    head[..CHECK_AT].copy_from_slice(&bytes[..CHECK_AT]);
    head[CHECK_AT..].copy_from_slice(&body.to_le_bytes());
    rapidhash_v3_seeded(&head, &SECRETS)
}

/// Compares two secrets in constant time.
pub(super) fn same(a: u64, b: u64) -> bool {
    std::hint::black_box(a ^ b) == 0
}

/// Compares two byte strings of the same length in constant time.
pub(super) fn same_bytes(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && std::hint::black_box(a.iter().zip(b).fold(0, |sum, (a, b)| sum | (a ^ b))) == 0
}

/// One entry of a DATA datagram.
#[derive(Clone, Copy)]
pub(super) struct Entry<'a> {
    pub(super) kind: EntryKind,
    pub(super) slot: usize,
    pub(super) index: usize,
    pub(super) count: usize,
    pub(super) number: u32,
    /// Size of the whole message in bytes.
    pub(super) size: usize,
    pub(super) payload: &'a [u8],
}

impl Entry<'_> {
    /// Decodes the payload of a HAVE.
    pub(super) fn have(&self) -> HaveBytes {
        HaveBytes::read_from_bytes(self.payload).expect("the entry was validated")
    }
}

/// The entries of a DATA datagram.
#[derive(Clone, Copy)]
pub(super) struct Entries<'a> {
    rest: &'a [u8],
}

impl<'a> Entries<'a> {
    /// Validates all entries before any of them has an effect. Calls `see` with each valid entry and the offset of its
    /// payload in the body, even if a later entry makes the datagram invalid.
    #[inline]
    pub(super) fn validate(
        body: &'a [u8],
        chunk: usize,
        mut see: impl FnMut(usize, &Entry<'a>),
    ) -> Result<Entries<'a>, PacketError> {
        let mut rest = body;
        while !rest.is_empty() {
            let (header, len) = EntryHeader::ref_from_prefix(rest)
                .map(|(header, _)| (header, header.len.get() as usize))
                .map_err(|_| PacketError::Length)?;
            let padded = len.checked_next_multiple_of(8).ok_or(PacketError::Length)?;
            let (padded, after) = rest[ENTRY..].split_at_checked(padded).ok_or(PacketError::Length)?;
            let (payload, padding) = padded.split_at(len);
            if padding.iter().any(|&byte| byte != 0) {
                return Err(PacketError::Field("padding"));
            }
            let entry = Entry::new(header, payload).ok_or(PacketError::Field("kind of entry"))?;
            entry.check(chunk)?;
            see(body.len() - rest.len() + ENTRY, &entry);
            rest = after;
        }
        Ok(Entries { rest: body })
    }
}

impl<'a> Iterator for Entries<'a> {
    type Item = Entry<'a>;

    #[inline]
    fn next(&mut self) -> Option<Entry<'a>> {
        // The entries were validated, so an error here only means that there are no more.
        let (header, rest) = EntryHeader::ref_from_prefix(self.rest).ok()?;
        let len = header.len.get() as usize;
        let payload = rest.get(..len)?;
        self.rest = rest.get(len.next_multiple_of(8)..)?;
        Entry::new(header, payload)
    }
}

impl<'a> Entry<'a> {
    /// Creates an entry from its header and payload. Returns `None` if the header has an unknown kind.
    #[inline]
    fn new(header: &EntryHeader, payload: &'a [u8]) -> Option<Entry<'a>> {
        Some(Entry {
            kind: EntryKind::ALL.get(usize::from(header.kind).wrapping_sub(1)).copied()?,
            slot: header.slot.into(),
            index: header.index.into(),
            count: header.count.into(),
            number: header.number.get(),
            size: header.size.get() as usize,
            payload,
        })
    }

    /// Whether this fragment is the only one of its message.
    #[inline]
    pub(super) fn is_whole(&self) -> bool {
        self.count == 1
    }

    #[inline]
    fn check(&self, chunk: usize) -> Result<(), PacketError> {
        if self.slot >= WINDOW_MAX {
            return Err(PacketError::Field("slot"));
        }
        let (size_min, size_max, unit) = match self.kind {
            EntryKind::Chain => (0, MESSAGE_BYTES_MAX, 1),
            EntryKind::Call | EntryKind::Reply => (PREFIX, MESSAGE_BYTES_MAX, 1),
            EntryKind::Retire => (0, MESSAGE_BYTES_MAX, RETIRED),
            EntryKind::Have => (size_of::<HaveBytes>(), size_of::<HaveBytes>(), 1),
            EntryKind::Cancel => (0, 0, 1),
        };
        if self.size < size_min || self.size > size_max || unit > 1 && !self.size.is_multiple_of(unit) {
            return Err(PacketError::Field("size"));
        }
        if self.count != fragments(self.size, chunk) || self.index >= self.count {
            return Err(PacketError::Field("count of fragments"));
        }
        if self.payload.len() != extent(self.size, chunk, self.index).1 {
            return Err(PacketError::Field("length"));
        }
        Ok(())
    }
}

/// A message to be split into fragments: the prefix that the session adds, if any, and the body.
#[derive(Clone, Copy)]
pub(super) struct Message<'a> {
    pub(super) kind: EntryKind,
    pub(super) slot: usize,
    pub(super) number: u32,
    pub(super) prefix: Option<[u8; PREFIX]>,
    pub(super) body: &'a [u8],
}

impl Message<'_> {
    #[inline]
    pub(super) fn size(&self) -> usize {
        self.prefix.map_or(0, |prefix| prefix.len()) + self.body.len()
    }

    /// Appends fragment `index` of this message to `out`. Every fragment but the last has `chunk` bytes.
    #[inline]
    pub(super) fn put(&self, out: &mut Vec<u8>, chunk: usize, index: usize) {
        let size = self.size();
        let (at, len) = extent(size, chunk, index);
        let header = EntryHeader {
            kind: self.kind as u8,
            slot: self.slot as u8,
            index: index as u8,
            count: fragments(size, chunk) as u8,
            number: U32::new(self.number),
            len: U32::new(len as u32),
            size: U32::new(size as u32),
        };
        out.reserve(footprint(len));
        out.extend_from_slice(header.as_bytes());
        let body = match self.prefix {
            // The first fragment is never shorter than the prefix, so the prefix is not split.
            Some(prefix) if index == 0 => {
                out.extend_from_slice(&prefix);
                &self.body[..len - PREFIX]
            }
            Some(_) => &self.body[at - PREFIX..][..len],
            None => &self.body[at..][..len],
        };
        out.extend_from_slice(body);
        if !len.is_multiple_of(8) {
            out.extend_from_slice(&[0; 8][len % 8..]);
        }
    }
}

/// Appends a HAVE entry to `out`.
pub(super) fn put_have(out: &mut Vec<u8>, slot: usize, number: u32, have: u64, want: u64) {
    let bytes = HaveBytes { have: U64::new(have), want: U64::new(want) };
    let message = Message { kind: EntryKind::Have, slot, number, prefix: None, body: bytes.as_bytes() };
    message.put(out, chunk(DATAGRAM_MIN), 0);
}

/// Appends an entry without payload to `out`.
pub(super) fn put_empty(out: &mut Vec<u8>, kind: EntryKind, slot: usize, number: u32) {
    let message = Message { kind, slot, number, prefix: None, body: &[] };
    message.put(out, chunk(DATAGRAM_MIN), 0);
}
