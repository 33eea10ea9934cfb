//! Datagrams that nobody on the way can read, change or make: sealed below sessions, which do not know of it.
//!
//! [`client`] is a client's end and [`node`] an engine's, with all its clients; both without sockets. A client and the
//! node share a token; what both know of it, [`Shared`], is where all keys come from.
//!
//! ```text
//! datagram: | magic u16 | version u8 | kind u8 | connection u32 | counter u64 |          16 bytes in the clear, then
//!   GREETING  | nonce u64 | name u64 | random 32 | sealed: length u16, datagram, zeros | tag 16 |    1200 in all
//!   ACCEPT    | random 32 | sealed: datagram | tag 16 |
//!   DATA      | sealed: datagram | tag 16 |
//! ```
//!
//! All numbers are little-endian. A client greets with random bytes of its own, and the node answers with more of its
//! own in ACCEPT, until it has heard DATA, which shows that the client has them. The greeting is sealed by a key of the
//! secret and the client's bytes; all else by keys of the secret and both, one for each direction. The counter is the
//! nonce of the seal, and all that is in the clear is sealed with the rest. `name` tells which token it is, and nothing
//! else of it. `nonce` is the one of a session's HELLO: by it a refusal, which is not sealed, shows that whoever sends
//! it has seen that.
//!
//! The seal of version 1 is AES-256-GCM, its keys are HKDF-SHA-256's. Magic, version, kind and nonce stay where they
//! are in all versions, so that two versions can tell each other which they are.
//!
//! What always holds:
//! - No key seals two datagrams under one counter, and none seals more than 2^32.
//! - What a datagram says is heard only if all of it is as it was sealed, and once; but for a greeting that comes again
//!   after its connection was forgotten: what answers that is sealed by keys that whoever recorded it lacks.
//! - What is kept of strangers has a bound, and is nothing before they have shown that they know a token.

pub mod client;
pub mod node;
mod window;

use crate::session::carrier::Dropped;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use window::Window;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// What every sealed datagram begins with: "Fx".
pub const MAGIC: u16 = u16::from_le_bytes(*b"Fx");
/// The version of these bytes, and of what seals them.
pub const VERSION: u8 = 1;
/// Bytes that a seal adds to a datagram of a connection.
pub const OVERHEAD: usize = HEADER + TAG;
/// Bytes of a greeting: as many as the least that any way must carry, so that no answer is longer.
pub const GREETING: usize = crate::session::DATAGRAM_MIN;

const HEADER: usize = size_of::<Header>();
const TAG: usize = 16;
/// Bytes of a greeting that are in the clear.
const GREETING_CLEAR: usize = HEADER + size_of::<GreetingBytes>();
/// What is sealed in a greeting.
const GREETING_SEALED: usize = GREETING - GREETING_CLEAR - TAG;
/// Bytes of an ACCEPT that are in the clear.
const ACCEPT_CLEAR: usize = HEADER + RANDOM;
const RANDOM: usize = 32;
/// What is sealed under one key of a direction: so many datagrams, as a power of two. Of 24 KiB each, they are fewer
/// than 2^43 blocks, which leaves whoever sees all of them a chance of less than 2^-43 to tell them from random bytes.
const EPOCH_BITS: u32 = 32;
const _: () = assert!(HEADER == 16 && OVERHEAD == 32 && GREETING_CLEAR == 64);

/// What a sealed datagram is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    /// A client asks for a connection.
    Greeting = 1,
    /// It has one, and this is its first answer.
    Accept = 2,
    /// Of a connection, in both directions.
    Data = 3,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Header {
    magic: U16,
    version: u8,
    kind: u8,
    connection: U32,
    counter: U64,
}

/// What a greeting has in the clear after its header.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct GreetingBytes {
    nonce: U64,
    name: U64,
    random: Random,
}

type Random = [u8; RANDOM];

impl Header {
    fn new(kind: Kind, connection: u32, counter: u64) -> Header {
        Header {
            magic: U16::new(MAGIC),
            version: VERSION,
            kind: kind as u8,
            connection: U32::new(connection),
            counter: U64::new(counter),
        }
    }

    /// The header of a datagram that says it is one of this version and long enough to be sealed.
    fn decode(bytes: &[u8]) -> Option<Header> {
        let (header, rest) = Header::read_from_prefix(bytes).ok()?;
        (header.magic.get() == MAGIC && header.version == VERSION && rest.len() >= TAG).then_some(header)
    }

    fn is(&self, kind: Kind) -> bool {
        self.kind == kind as u8
    }
}

/// Whether a datagram says that it is sealed.
pub fn is_sealed(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC.to_le_bytes())
}

/// The nonce of a greeting of any version, if the datagram is one.
pub fn greeting_nonce(bytes: &[u8]) -> Option<u64> {
    let (header, rest) = Header::ref_from_prefix(bytes).ok()?;
    let (nonce, _) = U64::read_from_prefix(rest).ok()?;
    (header.magic.get() == MAGIC && header.is(Kind::Greeting) && bytes.len() >= GREETING)
        .then_some(nonce.get())
}

/// What a client and the node know of a token, and nobody else: where their keys come from.
#[derive(Clone)]
pub struct Shared([u8; 32]);

impl Shared {
    /// Of these bytes, which must be as hard to guess as a key is.
    pub fn new(bytes: [u8; 32]) -> Shared {
        Shared(bytes)
    }

    /// What tells it from others in the clear. Who sees it learns nothing of the bytes that are shared.
    pub fn name(&self) -> u64 {
        let mut name = [0; 8];
        let prk = self.extract(&[]);
        let okm = prk.expand(&[b"farside udp name"], Bytes(name.len())).expect("eight bytes are few");
        okm.fill(&mut name).expect("it was asked for so many");
        u64::from_le_bytes(name)
    }

    fn extract(&self, salt: &[u8]) -> Prk {
        Salt::new(HKDF_SHA256, salt).extract(&self.0)
    }

    /// Of a greeting with these random bytes.
    fn greeting(&self, client: &Random) -> Keys {
        Keys::new(self.extract(client), b"farside udp greeting")
    }

    /// Of a connection: to the node, and to the client.
    fn connection(&self, client: &Random, node: &Random) -> [Keys; 2] {
        let prk = self.extract(&[*client, *node].concat());
        [Keys::new(prk.clone(), b"farside udp to the node"), Keys::new(prk, b"farside udp to the client")]
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shared") // Not in a log: it is a key.
    }
}

/// So many bytes from HKDF.
struct Bytes(usize);

impl KeyType for Bytes {
    fn len(&self) -> usize {
        self.0
    }
}

/// The keys of one direction, one after another: a datagram's counter says which it is sealed by.
struct Keys {
    secret: Prk,
    label: &'static [u8],
    epoch: u64,
    key: LessSafeKey,
}

impl Keys {
    fn new(secret: Prk, label: &'static [u8]) -> Keys {
        let key = Keys::derive(&secret, label, 0);
        Keys { secret, label, epoch: 0, key }
    }

    fn derive(secret: &Prk, label: &[u8], epoch: u64) -> LessSafeKey {
        let info = [label, &epoch.to_le_bytes()];
        let okm = secret.expand(&info, &AES_256_GCM).expect("a key is not too long");
        LessSafeKey::new(UnboundKey::from(okm))
    }

    fn at(&self, epoch: u64) -> LessSafeKey {
        Keys::derive(&self.secret, self.label, epoch)
    }
}

fn nonce(counter: u64) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[..8].copy_from_slice(&counter.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

/// Seals what goes one way.
struct Sealer {
    keys: Keys,
    /// Of the next datagram.
    counter: u64,
}

impl Sealer {
    fn new(keys: Keys) -> Sealer {
        Sealer { keys, counter: 0 }
    }

    /// Appends to `out` a datagram of these bytes in the clear and those that `write` appends, which are sealed there.
    fn seal(
        &mut self,
        out: &mut Vec<u8>,
        kind: Kind,
        connection: u32,
        clear: &[u8],
        write: impl FnOnce(&mut Vec<u8>),
    ) {
        let epoch = self.counter >> EPOCH_BITS;
        if epoch != self.keys.epoch {
            (self.keys.key, self.keys.epoch) = (self.keys.at(epoch), epoch);
        }
        let begin = out.len();
        out.extend_from_slice(Header::new(kind, connection, self.counter).as_bytes());
        out.extend_from_slice(clear);
        let sealed = out.len() - begin;
        write(out);
        let (clear, plain) = out[begin..].split_at_mut(sealed);
        let tag = self.keys.key.seal_in_place_separate_tag(nonce(self.counter), Aad::from(clear), plain);
        out.extend_from_slice(tag.expect("a datagram is not too long for a seal").as_ref());
        self.counter += 1; // At a million a second, for half a million years.
    }
}

/// Why a datagram was not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unopened {
    /// It was not sealed by whoever has the key, or not as it is now.
    Forged,
    /// It was opened before, or is so old that nobody knows.
    Replayed,
}

/// Opens what comes one way.
struct Opener {
    keys: Keys,
    /// The key before, for datagrams that were overtaken.
    before: Option<LessSafeKey>,
    window: Window,
}

impl Opener {
    fn new(keys: Keys) -> Opener {
        Opener { keys, before: None, window: Window::default() }
    }

    /// Opens in place a datagram of which so many bytes are in the clear. What is no datagram is a forgery; of what is
    /// not opened the bytes are no longer what they were.
    fn open<'a>(&mut self, bytes: &'a mut [u8], clear: usize) -> Result<&'a mut [u8], Unopened> {
        let counter = Header::decode(bytes).ok_or(Unopened::Forged)?.counter.get();
        if bytes.len() < clear + TAG {
            return Err(Unopened::Forged);
        }
        if !self.window.is_new(counter) {
            return Err(Unopened::Replayed);
        }
        let epoch = counter >> EPOCH_BITS;
        let next = (self.keys.epoch + 1 == epoch).then(|| self.keys.at(epoch));
        let key = match &next {
            Some(next) => next,
            None if epoch == self.keys.epoch => &self.keys.key,
            None if epoch + 1 == self.keys.epoch => self.before.as_ref().ok_or(Unopened::Forged)?,
            None => return Err(Unopened::Forged),
        };
        let (clear, sealed) = bytes.split_at_mut(clear);
        let opened = key.open_in_place(nonce(counter), Aad::from(clear), sealed);
        let opened = opened.map_err(|_| Unopened::Forged)?;
        if let Some(next) = next {
            self.before = Some(std::mem::replace(&mut self.keys.key, next));
            self.keys.epoch = epoch;
        }
        self.window.note(counter);
        Ok(opened)
    }
}

/// Counts what came and was not opened.
fn count(dropped: &mut Dropped, unopened: Unopened) {
    match unopened {
        Unopened::Forged => dropped.forged += 1,
        Unopened::Replayed => dropped.replayed += 1,
    }
}

#[cfg(test)]
mod tests;
