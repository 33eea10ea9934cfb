//! Sealed datagrams, which nobody on the path can read, change or forge. Sessions run on top of them, unaware of the
//! seal.
//!
//! [`client`] is a client's end, and [`node`] an engine's end with all its clients; both work without sockets. A client
//! and the node share a token. All keys derive from [`Shared`], the secret that both compute from the token.
//!
//! ```text
//! datagram: | magic u16 | version u8 | kind u8 | connection u32 | counter u64 |          16 bytes in the clear, then
//!   GREETING  | nonce u64 | name u64 | random 32 | sealed: length u16, datagram, zeros | tag 16 |    1200 in all
//!   ACCEPT    | random 32 | sealed: datagram | tag 16 |
//!   DATA      | sealed: datagram | tag 16 |
//! ```
//!
//! All numbers are little-endian. A client sends its random bytes in a GREETING. The node adds random bytes of its own
//! in an ACCEPT. The node sends ACCEPTs until it receives a DATA, which proves that the client has the node's random
//! bytes.
//!
//! - The greeting is sealed with a key derived from the secret and the client's random bytes. Everything else is sealed
//!   with keys derived from the secret and both random values, one key per direction.
//! - The counter is the nonce of the cipher. The clear part is authenticated as well.
//! - `name` identifies the token and reveals nothing else about it.
//! - `nonce` is that of the session's HELLO. A refusal is not sealed; it repeats the nonce to prove that its sender has
//!   seen the greeting.
//!
//! Version 1 seals with AES-256-GCM and derives keys with HKDF-SHA-256. The fields `magic`, `version`, `kind` and
//! `nonce` have the same place in all versions, so that two versions can report the mismatch to each other.
//!
//! Invariants:
//! - No key seals two datagrams with the same counter, and no key seals more than 2^32 datagrams.
//! - A datagram is accepted only if it is unchanged, and only once. There is one exception: after a connection was
//!   forgotten, a replay of its greeting is accepted. The response is sealed with keys that the replayer does not have.
//! - The memory used for senders without a session is bounded. This memory is zero until the senders have proved that
//!   they know a token.

pub mod client;
pub mod node;
mod window;

use crate::session::carrier::Dropped;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use window::Window;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First two bytes of every sealed datagram: "Fx".
pub const MAGIC: u16 = u16::from_le_bytes(*b"Fx");
/// Version of the format and of the seal.
pub const VERSION: u8 = 1;
/// Number of bytes that a seal adds to a datagram of a connection.
pub const OVERHEAD: usize = HEADER + TAG;
/// Size of a greeting in bytes: the size that every path must carry. No response to a greeting is larger.
pub const GREETING: usize = crate::session::DATAGRAM_MIN;

const HEADER: usize = size_of::<Header>();
const TAG: usize = 16;
/// Size in bytes of the clear part of a greeting.
const GREETING_CLEAR: usize = HEADER + size_of::<GreetingBytes>();
/// Size in bytes of the sealed part of a greeting.
const GREETING_SEALED: usize = GREETING - GREETING_CLEAR - TAG;
/// Size in bytes of the clear part of an ACCEPT.
const ACCEPT_CLEAR: usize = HEADER + RANDOM;
const RANDOM: usize = 32;
/// Maximum number of datagrams sealed with one key of a direction, as a power of two. With 24 KiB each, 2^32 datagrams
/// have fewer than 2^43 blocks. An observer of all these blocks can distinguish them from random bytes with a
/// probability of less than 2^-43.
const EPOCH_BITS: u32 = 32;
const _: () = assert!(HEADER == 16 && OVERHEAD == 32 && GREETING_CLEAR == 64);

/// Kind of a sealed datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    /// A client requests a connection.
    Greeting = 1,
    /// The node's first responses on a connection.
    Accept = 2,
    /// A datagram on a connection, in either direction.
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

/// Clear part of a greeting after its header.
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

    /// Decodes the header of a datagram. Returns `None` if the datagram has another version, or is too short to be
    /// sealed.
    fn decode(bytes: &[u8]) -> Option<Header> {
        let (header, rest) = Header::read_from_prefix(bytes).ok()?;
        (header.magic.get() == MAGIC && header.version == VERSION && rest.len() >= TAG).then_some(header)
    }

    fn is(&self, kind: Kind) -> bool {
        self.kind == kind as u8
    }
}

/// Whether the first bytes of a datagram say that it is sealed.
pub fn is_sealed(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC.to_le_bytes())
}

/// Returns the nonce if the datagram is a greeting, of any version.
pub fn greeting_nonce(bytes: &[u8]) -> Option<u64> {
    let (header, rest) = Header::ref_from_prefix(bytes).ok()?;
    let (nonce, _) = U64::read_from_prefix(rest).ok()?;
    (header.magic.get() == MAGIC && header.is(Kind::Greeting) && bytes.len() >= GREETING)
        .then_some(nonce.get())
}

/// The secret that a client and the node compute from their token. Nobody else knows it. All keys derive from it.
#[derive(Clone)]
pub struct Shared([u8; 32]);

impl Shared {
    /// Creates a secret from these bytes, which must be as hard to guess as a key.
    pub fn new(bytes: [u8; 32]) -> Shared {
        Shared(bytes)
    }

    /// Returns an identifier of the secret for use in the clear. The identifier reveals nothing else about the secret.
    pub fn name(&self) -> u64 {
        let mut name = [0; 8];
        let prk = self.extract(&[]);
        let okm = prk
            .expand(&[b"farside udp name"], Bytes(name.len()))
            .expect("eight bytes are within HKDF's limit");
        okm.fill(&mut name).expect("the length is the one requested");
        u64::from_le_bytes(name)
    }

    fn extract(&self, salt: &[u8]) -> Prk {
        Salt::new(HKDF_SHA256, salt).extract(&self.0)
    }

    /// Returns the key of a greeting with these random bytes.
    fn greeting(&self, client: &Random) -> Keys {
        Keys::new(self.extract(client), b"farside udp greeting")
    }

    /// Returns the keys of a connection: first that of the direction to the node, then that to the client.
    fn connection(&self, client: &Random, node: &Random) -> [Keys; 2] {
        let prk = self.extract(&[*client, *node].concat());
        [Keys::new(prk.clone(), b"farside udp to the node"), Keys::new(prk, b"farside udp to the client")]
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shared") // Must not appear in a log: it is a key.
    }
}

/// Number of bytes to derive, in the form that the HKDF library takes.
struct Bytes(usize);

impl KeyType for Bytes {
    fn len(&self) -> usize {
        self.0
    }
}

/// The successive keys of one direction. A datagram's counter selects its key.
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
        let okm = secret.expand(&info, &AES_256_GCM).expect("a key is within HKDF's limit");
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

/// Seals the datagrams of one direction.
struct Sealer {
    keys: Keys,
    /// Counter of the next datagram.
    counter: u64,
}

impl Sealer {
    fn new(keys: Keys) -> Sealer {
        Sealer { keys, counter: 0 }
    }

    /// Appends a sealed datagram to `out`: a header, the bytes `clear`, and the bytes that `write` appends, encrypted
    /// in place.
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
        out.extend_from_slice(tag.expect("a datagram is within AES-GCM's limit").as_ref());
        self.counter += 1; // Overflows after half a million years at a million per second.
    }
}

/// Reason why a datagram was not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unopened {
    /// The datagram was not sealed with the current key, or was changed.
    Forged,
    /// The datagram was opened before, or is too old to know whether it was.
    Replayed,
}

/// Opens the datagrams of one direction.
struct Opener {
    keys: Keys,
    /// The previous key, for datagrams that later ones have overtaken.
    before: Option<LessSafeKey>,
    window: Window,
}

impl Opener {
    fn new(keys: Keys) -> Opener {
        Opener { keys, before: None, window: Window::default() }
    }

    /// Opens a datagram in place. Its first `clear` bytes are in the clear. A malformed datagram counts as forged. If a
    /// datagram is not opened, its bytes may have been changed.
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

/// Counts a datagram that was not opened.
fn count(dropped: &mut Dropped, unopened: Unopened) {
    match unopened {
        Unopened::Forged => dropped.forged += 1,
        Unopened::Replayed => dropped.replayed += 1,
    }
}

#[cfg(test)]
mod tests;
