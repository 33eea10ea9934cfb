//! A client's end: sends greetings until one is accepted, then seals and opens datagrams.
//!
//! After a restart, a node does not know the connection any more. The client could not believe an unsealed report of
//! that, because anyone could forge it. So if a PING gets no response, the next PING is also sent in a greeting. The
//! response to a greeting is sealed.
//!
//! Invariant: the only effect of an unsealed datagram is to refuse a greeting.

use super::{
    ACCEPT_CLEAR, GREETING, GREETING_CLEAR, GREETING_SEALED, GreetingBytes, HEADER, Header, Kind, OVERHEAD,
    Opener, RANDOM, Random, Sealer, Shared, TAG, Unopened, count, is_sealed,
};
use crate::session::carrier::Dropped;
use crate::session::packet;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// A client's end of a sealed connection.
pub struct Client {
    shared: Shared,
    random: Box<dyn FnMut() -> Random + Send>,
    greeting: Greeting,
    connection: Option<Connection>,
    /// A greeting that was sent to find out whether the node has restarted.
    question: Option<Greeting>,
    /// Number of PINGs since the last datagram from the node.
    pings: u32,
    dropped: Dropped,
}

struct Connection {
    number: u32,
    /// The node's random bytes, which identify the connection. Its number would not suffice: after a restart of the
    /// node, another connection may have the same number.
    node: Random,
    sealer: Sealer,
    opener: Opener,
}

impl Client {
    /// Creates the end of a client with this secret. `random` must return different bytes on each call.
    pub fn new(shared: Shared, mut random: impl FnMut() -> Random + Send + 'static) -> Client {
        let greeting = Greeting::new(&shared, random());
        Client {
            shared,
            random: Box::new(random),
            greeting,
            connection: None,
            question: None,
            pings: 0,
            dropped: Dropped::default(),
        }
    }

    /// Size of a datagram after sealing.
    pub fn sealed_len(&self, datagram: &[u8]) -> usize {
        if self.connection.is_some() { datagram.len() + OVERHEAD } else { GREETING }
    }

    /// Appends the sealed datagram to `out`.
    pub fn seal(&mut self, datagram: &[u8], out: &mut Vec<u8>) {
        match &mut self.connection {
            Some(Connection { number, sealer, .. }) => {
                sealer.seal(out, Kind::Data, *number, &[], |out| out.extend_from_slice(datagram));
            }
            None => self.greeting.seal(&self.shared, datagram, out),
        }
    }

    /// Whether a datagram must also be sent by [`Client::seal_in_greeting`]: it is a PING, and an earlier one got no
    /// response on the connection. Call this once per datagram.
    pub fn needs_greeting(&mut self, datagram: &[u8]) -> bool {
        let is_question = self.connection.is_some() && packet::is(datagram, packet::Kind::Ping);
        self.pings += u32::from(is_question);
        is_question && self.pings > 1
    }

    /// Appends a greeting that contains the datagram.
    pub fn seal_in_greeting(&mut self, datagram: &[u8], out: &mut Vec<u8>) {
        let question = self.question.get_or_insert_with(|| Greeting::new(&self.shared, (self.random)()));
        question.seal(&self.shared, datagram, out);
    }

    /// Opens a received datagram in place. Returns an unsealed refusal unchanged, and `None` if the datagram was not
    /// opened.
    pub fn open<'a>(&mut self, bytes: &'a mut [u8]) -> Option<&'a [u8]> {
        if !is_sealed(bytes) {
            let may_be = self.connection.is_none() && packet::is(bytes, packet::Kind::Refused);
            return may_be.then_some(bytes);
        }
        match self.take(bytes) {
            Ok(datagram) => {
                (self.pings, self.question) = (0, None);
                Some(datagram)
            }
            Err(unopened) => {
                count(&mut self.dropped, unopened);
                None
            }
        }
    }

    /// Returns the numbers of received datagrams that were not opened.
    pub fn dropped(&self) -> Dropped {
        self.dropped
    }

    fn take<'a>(&mut self, bytes: &'a mut [u8]) -> Result<&'a [u8], Unopened> {
        let header = Header::decode(bytes).ok_or(Unopened::Forged)?;
        let number = header.connection.get();
        let is_accept = header.is(Kind::Accept);
        if !is_accept && !header.is(Kind::Data) {
            return Err(Unopened::Forged);
        }
        match &mut self.connection {
            Some(Connection { number: ours, opener, .. }) if *ours == number && !is_accept => {
                opener.open(bytes, HEADER).map(|datagram| &*datagram)
            }
            Some(Connection { node, opener, .. }) if is_accept && bytes[HEADER..].starts_with(node) => {
                opener.open(bytes, ACCEPT_CLEAR).map(|datagram| &*datagram)
            }
            Some(_) if is_accept => {
                let question = self.question.as_ref().ok_or(Unopened::Forged)?;
                question.accept(&self.shared, bytes).map(|(_, datagram)| datagram)
            }
            None if is_accept => {
                let (connection, datagram) = self.greeting.accept(&self.shared, bytes)?;
                self.connection = Some(connection);
                Ok(datagram)
            }
            _ => Err(Unopened::Forged),
        }
    }
}

/// A request for a connection.
struct Greeting {
    random: Random,
    sealer: Sealer,
}

impl Greeting {
    fn new(shared: &Shared, random: Random) -> Greeting {
        Greeting { random, sealer: Sealer::new(shared.greeting(&random)) }
    }

    /// Appends a greeting that contains a datagram. If the datagram is longer than the greeting's space, the bytes
    /// beyond that space must be zeros, like those of a HELLO.
    fn seal(&mut self, shared: &Shared, datagram: &[u8], out: &mut Vec<u8>) {
        let said = datagram.len() - datagram.iter().rev().take_while(|&&byte| byte == 0).count();
        assert!(said + 2 <= GREETING_SEALED, "a greeting holds a HELLO with the longest token");
        let clear = GreetingBytes {
            nonce: U64::new(packet::greeting(datagram).map_or(0, |greeting| greeting.nonce)),
            name: U64::new(shared.name()),
            random: self.random,
        };
        let begin = out.len();
        self.sealer.seal(out, Kind::Greeting, 0, clear.as_bytes(), |out| {
            let len = u16::try_from(datagram.len()).expect("a greeting's datagram is short");
            out.extend_from_slice(&len.to_le_bytes());
            out.extend_from_slice(&datagram[..said]);
            out.resize(begin + GREETING_CLEAR + GREETING_SEALED, 0);
        });
    }

    /// Derives the connection's keys from an ACCEPT. Returns the connection, and the datagram that the ACCEPT contains.
    fn accept<'a>(&self, shared: &Shared, bytes: &'a mut [u8]) -> Result<(Connection, &'a [u8]), Unopened> {
        if bytes.len() < ACCEPT_CLEAR + TAG {
            return Err(Unopened::Forged);
        }
        let number = Header::decode(bytes).ok_or(Unopened::Forged)?.connection.get();
        let mut node = [0; RANDOM];
        node.copy_from_slice(&bytes[HEADER..ACCEPT_CLEAR]);
        let [to_node, to_client] = shared.connection(&self.random, &node);
        let mut opener = Opener::new(to_client);
        let datagram = opener.open(bytes, ACCEPT_CLEAR)?;
        Ok((Connection { number, node, sealer: Sealer::new(to_node), opener }, datagram))
    }
}
