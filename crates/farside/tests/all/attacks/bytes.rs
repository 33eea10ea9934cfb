//! Builds datagrams and chains byte by byte, from the description of the layout. Tests may set any field to a wrong
//! value.

use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};

pub(crate) const HELLO: u8 = 1;
pub(crate) const WELCOME: u8 = 2;
pub(crate) const REFUSED: u8 = 3;
pub(crate) const DATA: u8 = 4;
pub(crate) const PING: u8 = 5;
pub(crate) const PONG: u8 = 6;
pub(crate) const BYE: u8 = 7;
pub(crate) const GONE: u8 = 8;

pub(crate) const CHAIN: u8 = 1;
pub(crate) const CALL: u8 = 2;
pub(crate) const RETIRE: u8 = 3;
pub(crate) const REPLY: u8 = 4;
pub(crate) const HAVE: u8 = 5;
pub(crate) const CANCEL: u8 = 6;

/// Bytes of a datagram's header.
pub(crate) const HEADER: usize = 24;
/// Datagram size in bytes that these peers request: the minimum, so that messages have many fragments.
pub(crate) const DATAGRAM: usize = 1200;
/// Maximum number of bytes of a message's fragment in a datagram of that size.
pub(crate) const CHUNK: usize = 1160;

/// Writes the correct checksum into a datagram.
pub(crate) fn seal(bytes: &mut [u8]) {
    if bytes.len() >= HEADER {
        let secrets = RapidSecrets::seed(0x6661_7273_6964_6501);
        let mut head = bytes[..16].to_vec();
        head.extend_from_slice(&rapidhash_v3_seeded(&bytes[HEADER..], &secrets).to_le_bytes());
        let check = rapidhash_v3_seeded(&head, &secrets);
        bytes[16..HEADER].copy_from_slice(&check.to_le_bytes());
    }
}

pub(crate) fn datagram(kind: u8, session: u32, secret: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes =
        [b"Fs\x02", &[kind][..], &session.to_le_bytes(), &secret.to_le_bytes(), &[0; 8], body].concat();
    seal(&mut bytes);
    bytes
}

pub(crate) fn hello(identity: u128, incarnation: u64, nonce: u64, token: &[u8]) -> Vec<u8> {
    let mut body = [&identity.to_le_bytes()[..], &incarnation.to_le_bytes(), &[0; 8]].concat();
    for word in [DATAGRAM as u32, 1 << 20, token.len() as u32, 0] {
        body.extend_from_slice(&word.to_le_bytes());
    }
    body.extend_from_slice(token);
    body.resize(body.len().max(DATAGRAM - HEADER), 0);
    datagram(HELLO, 0, nonce, &body)
}

/// One entry of a DATA datagram. Tests may set any field to a wrong value.
#[derive(Clone, Copy)]
pub(crate) struct Entry<'a> {
    pub(crate) kind: u8,
    pub(crate) slot: u8,
    pub(crate) index: u8,
    pub(crate) count: u8,
    pub(crate) number: u32,
    pub(crate) len: u32,
    pub(crate) size: u32,
    pub(crate) payload: &'a [u8],
}

impl<'a> Entry<'a> {
    /// Returns an entry that holds a whole message.
    pub(crate) fn whole(kind: u8, slot: u8, number: u32, payload: &'a [u8]) -> Entry<'a> {
        let len = payload.len() as u32;
        Entry { kind, slot, index: 0, count: 1, number, len, size: len, payload }
    }

    /// Returns an entry with fragment `index` of a message.
    pub(crate) fn part(kind: u8, slot: u8, number: u32, message: &'a [u8], index: usize) -> Entry<'a> {
        let at = index * CHUNK;
        let payload = &message[at..message.len().min(at + CHUNK)];
        let count = message.len().div_ceil(CHUNK) as u8;
        let (len, size) = (payload.len() as u32, message.len() as u32);
        Entry { kind, slot, index: index as u8, count, number, len, size, payload }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![self.kind, self.slot, self.index, self.count];
        for word in [self.number, self.len, self.size] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(self.payload);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }
}

pub(crate) fn entries(entries: &[Entry<'_>]) -> Vec<u8> {
    entries.iter().flat_map(Entry::bytes).collect()
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

pub(crate) const READ: u8 = 1;
pub(crate) const WRITE: u8 = 2;
pub(crate) const ALLOCATE: u8 = 3;
pub(crate) const CAS: u8 = 4;
pub(crate) const FETCH_ADD: u8 = 5;

pub(crate) const TARGET_INDIRECT: u8 = 1;
pub(crate) const DATA_INDIRECT: u8 = 2;
pub(crate) const BOUNDED: u8 = 4;
pub(crate) const CONDITIONAL: u8 = 8;
pub(crate) const REDIRECT: u8 = 16;
pub(crate) const COMPARE: u8 = 32;
pub(crate) const MASKED: u8 = 64;

/// Address bit that selects the chain's scratch.
pub(crate) const SCRATCH: u64 = 1 << 63;

pub(crate) const OK: u8 = 0;
pub(crate) const CAS_FAILED: u8 = 1;
pub(crate) const SKIPPED: u8 = 2;
pub(crate) const ABORTED: u8 = 3;
pub(crate) const ACCESS: u8 = 5;
pub(crate) const NULL_POINTER: u8 = 6;
pub(crate) const INVALID: u8 = 7;
pub(crate) const TOO_LONG: u8 = 8;

/// One op of a chain.
#[derive(Clone, Default)]
pub(crate) struct Op {
    pub(crate) code: u8,
    pub(crate) flags: u8,
    pub(crate) mode: u8,
    pub(crate) width: u8,
    pub(crate) len: u32,
    pub(crate) at: u64,
    /// Address operands and payload, which follow the fixed fields.
    pub(crate) rest: Vec<u8>,
}

pub(crate) fn read(at: u64, len: u32) -> Op {
    Op { code: READ, len, at, ..Op::default() }
}

pub(crate) fn write(at: u64, bytes: &[u8]) -> Op {
    Op { code: WRITE, len: bytes.len() as u32, at, rest: bytes.to_vec(), ..Op::default() }
}

pub(crate) fn fetch_add(at: u64, addend: u64) -> Op {
    Op { code: FETCH_ADD, width: 8, at, rest: addend.to_le_bytes().to_vec(), ..Op::default() }
}

pub(crate) fn allocate(list: u64, bytes: &[u8]) -> Op {
    Op { code: ALLOCATE, len: bytes.len() as u32, at: list, rest: bytes.to_vec(), ..Op::default() }
}

/// Returns a CAS with two operands of `width` bytes each.
pub(crate) fn cas(at: u64, width: u8, compare: &[u8], swap: &[u8]) -> Op {
    let rest = [compare, swap].concat();
    Op { code: CAS, flags: COMPARE, width, at, rest, ..Op::default() }
}

impl Op {
    pub(crate) fn with(mut self, flags: u8) -> Op {
        self.flags |= flags;
        self
    }

    /// Adds a flag and the flag's address operand, which precedes the payload. The operand is the destination of the
    /// output or the source of the data.
    pub(crate) fn by(mut self, flag: u8, address: u64) -> Op {
        self.flags |= flag;
        self.rest.splice(0..0, address.to_le_bytes());
        self
    }
}

/// Fields of a chain's header that describe the chain: its size in bytes and its numbers of ops.
#[derive(Clone, Copy)]
pub(crate) struct Claims {
    pub(crate) bytes: u32,
    pub(crate) ops: u16,
    pub(crate) allocates: u16,
    pub(crate) atomics: u16,
    pub(crate) reserved: u16,
}

pub(crate) fn chain(key: (u32, u64), ops: &[Op]) -> Vec<u8> {
    chain_that_claims(key, ops, |_| {})
}

pub(crate) fn chain_that_claims(key: (u32, u64), ops: &[Op], lie: impl FnOnce(&mut Claims)) -> Vec<u8> {
    let mut body = Vec::new();
    for op in ops {
        body.extend_from_slice(&[op.code, op.flags, op.mode, op.width]);
        body.extend_from_slice(&op.len.to_le_bytes());
        body.extend_from_slice(&op.at.to_le_bytes());
        body.extend_from_slice(&op.rest);
    }
    let count = |codes: &[u8]| ops.iter().filter(|op| codes.contains(&op.code)).count() as u16;
    let mut claims = Claims {
        bytes: body.len() as u32,
        ops: ops.len() as u16,
        allocates: count(&[ALLOCATE]),
        atomics: count(&[CAS, FETCH_ADD]),
        reserved: 0,
    };
    lie(&mut claims);
    let mut bytes = [&key.1.to_le_bytes()[..], &key.0.to_le_bytes(), &claims.bytes.to_le_bytes()].concat();
    for half in [claims.ops, claims.allocates, claims.atomics, claims.reserved] {
        bytes.extend_from_slice(&half.to_le_bytes());
    }
    [bytes, body].concat()
}

/// Decoded reply to a chain.
#[derive(Debug)]
pub(crate) enum ChainReply {
    /// No op ran, for this reason.
    Refused(String),
    /// The chain ran; holds the status and the output of each op.
    Ran(Vec<(u8, Vec<u8>)>),
}

impl ChainReply {
    #[track_caller]
    pub(crate) fn of(reply: &[u8], ops: usize) -> ChainReply {
        if reply.first() == Some(&0xff) {
            return ChainReply::Refused(String::from_utf8(reply[1..].to_vec()).expect("a reason is text"));
        }
        let outputs = &reply[ops * 8..];
        let mut begin = 0;
        let op = |index: usize| {
            let end = u32_at(reply, index * 8 + 4) as usize;
            let output = outputs[begin..end].to_vec();
            begin = end;
            (reply[index * 8], output)
        };
        ChainReply::Ran((0..ops).map(op).collect())
    }

    #[track_caller]
    pub(crate) fn statuses(&self) -> Vec<u8> {
        match self {
            ChainReply::Refused(reason) => panic!("refused: {reason}"),
            ChainReply::Ran(ops) => ops.iter().map(|(status, _)| *status).collect(),
        }
    }

    #[track_caller]
    pub(crate) fn output(&self, op: usize) -> &[u8] {
        match self {
            ChainReply::Refused(reason) => panic!("refused: {reason}"),
            ChainReply::Ran(ops) => &ops[op].1,
        }
    }
}
