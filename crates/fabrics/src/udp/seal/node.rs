//! An engine's end of all its sealed connections.
//!
//! A greeting that can be opened creates a connection. If the same greeting comes again, it belongs to that connection
//! if it comes from the same address, and is ignored otherwise. A connection without a session is forgotten, with its
//! keys, after [`STRANGER_WAIT`], or earlier if there are too many connections.
//!
//! Invariant: there are at most [`CONNECTIONS_MAX`] connections, and one with a session is never forgotten.
//! Invariant: a greeting that cannot be opened gets a response smaller than itself. The cost of handling such a
//! greeting does not depend on its fault.

use super::{
    GREETING, GREETING_CLEAR, GREETING_SEALED, GreetingBytes, HEADER, Header, Kind, OVERHEAD, Opener, RANDOM,
    Random, Sealer, Shared, Unopened, count, greeting_nonce, is_sealed,
};
use crate::session::DATAGRAM_MIN;
use crate::session::carrier::{Dropped, Outsider};
use crate::session::packet;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;
use zerocopy::FromBytes;

/// Maximum number of connections per engine: one per session, and more for clients that come and go.
pub const CONNECTIONS_MAX: usize = 20 * 1024;
/// How long a connection without a session is kept, so that its client may come back and ask about its operations.
pub const STRANGER_WAIT: Duration = Duration::from_secs(30);

/// Function that returns the secret with the given name, if the node knows one.
pub type Find = dyn Fn(u64) -> Option<Shared> + Send;
type Draw = dyn FnMut() -> Random + Send;

/// All connections of one engine.
pub struct Node {
    find: Box<Find>,
    random: Box<Draw>,
    /// A secret used in place of one with an unknown name, so that an unknown name takes as long as a known one.
    decoy: Shared,
    places: Vec<Option<Box<Connection>>>,
    vacant: Vec<u16>,
    /// Index of each connection in the places, by the random bytes of its greeting.
    greeted: HashMap<Random, u16>,
    /// Connections without a session, oldest first: the number of each, and the time of the check that found no
    /// session. Some may have been forgotten or have got a session since.
    strangers: VecDeque<(u32, Duration)>,
    /// The datagram that the last greeting contained.
    said: Vec<u8>,
    dropped: Dropped,
}

struct Connection {
    number: u32,
    peer: SocketAddr,
    /// Random bytes of the client and of the node, in this order.
    random: [Random; 2],
    /// Lowest counter that the next greeting may have. A lower one shows that the greeting is a replay.
    greetings: u64,
    /// Whether the client has proved that it has the keys.
    is_confirmed: bool,
    /// Time of the check that first found the connection without a session; `None` if the last check found one.
    stranger_since: Option<Duration>,
    sealer: Sealer,
    opener: Opener,
}

/// Outcome of a received datagram.
#[derive(Debug, PartialEq, Eq)]
pub enum Arrived<'a> {
    /// A datagram on the connection with this number.
    Datagram(u32, &'a [u8]),
    /// A greeting that must be refused, sealed or not: its nonce, and the reason.
    Outsider(u64, Outsider),
    /// A datagram without any effect.
    Nothing,
}

impl Node {
    /// Creates an end without connections. `random` must return different, unpredictable bytes on each call.
    pub fn new(find: Box<Find>, mut random: Box<Draw>) -> Node {
        let decoy = Shared::new(random());
        Node {
            find,
            random,
            decoy,
            places: Vec::new(),
            vacant: Vec::new(),
            greeted: HashMap::new(),
            strangers: VecDeque::new(),
            said: Vec::new(),
            dropped: Dropped::default(),
        }
    }

    /// Opens a received datagram in place.
    pub fn open<'a>(&'a mut self, from: SocketAddr, bytes: &'a mut [u8]) -> Arrived<'a> {
        if !is_sealed(bytes) {
            return match packet::greeting(bytes) {
                Some(packet::Greeting { nonce, shows_token }) => {
                    Arrived::Outsider(nonce, Outsider::Unsealed { shows_token })
                }
                None => self.drop(Unopened::Forged),
            };
        }
        if let Some(nonce) = greeting_nonce(bytes) {
            return match bytes[2] {
                super::VERSION if bytes.len() == GREETING => self.greeting(from, nonce, bytes),
                super::VERSION => self.drop(Unopened::Forged),
                version => {
                    Arrived::Outsider(nonce, Outsider::Version { theirs: version, ours: super::VERSION })
                }
            };
        }
        let Some(header) = Header::decode(bytes).filter(|header| header.is(Kind::Data)) else {
            return self.drop(Unopened::Forged);
        };
        let number = header.connection.get();
        let Some(connection) = self.get(number).filter(|connection| connection.peer == from) else {
            return self.drop(Unopened::Forged);
        };
        match connection.opener.open(bytes, HEADER) {
            Ok(datagram) => {
                connection.is_confirmed = true;
                Arrived::Datagram(number, datagram)
            }
            Err(unopened) => self.drop(unopened),
        }
    }

    /// Returns the number of bytes that sealing adds to a datagram of this connection; `None` if the connection is
    /// forgotten.
    pub fn overhead(&mut self, number: u32) -> Option<usize> {
        let connection = self.get(number)?;
        Some(OVERHEAD + if connection.is_confirmed { 0 } else { RANDOM })
    }

    /// Appends a datagram, sealed for this connection, which must exist.
    pub fn seal(&mut self, number: u32, datagram: &[u8], out: &mut Vec<u8>) {
        let connection = self.get(number).expect("the connection exists");
        let Connection { random, is_confirmed, sealer, .. } = connection;
        let write = |out: &mut Vec<u8>| out.extend_from_slice(datagram);
        match is_confirmed {
            true => sealer.seal(out, Kind::Data, number, &[], write),
            false => sealer.seal(out, Kind::Accept, number, &random[1], write),
        }
    }

    /// Forgets connections that have had no session for [`STRANGER_WAIT`]. `known` names the connections that have a
    /// session.
    pub fn forget_strangers(&mut self, now: Duration, known: impl Iterator<Item = u32>) {
        let known: HashSet<u32> = known.collect();
        for connection in self.places.iter_mut().flatten() {
            match (known.contains(&connection.number), connection.stranger_since) {
                (true, _) => connection.stranger_since = None,
                (false, None) => {
                    connection.stranger_since = Some(now);
                    self.strangers.push_back((connection.number, now));
                }
                (false, Some(_)) => {}
            }
        }
        while let Some(&(_, since)) = self.strangers.front()
            && now.saturating_sub(since) >= STRANGER_WAIT
        {
            self.forget_oldest();
        }
    }

    /// Returns the number of connections.
    pub fn connections(&self) -> usize {
        self.places.len() - self.vacant.len()
    }

    /// Returns the numbers of received datagrams that were not opened.
    pub fn dropped(&self) -> Dropped {
        self.dropped
    }

    fn drop(&mut self, unopened: Unopened) -> Arrived<'static> {
        count(&mut self.dropped, unopened);
        Arrived::Nothing
    }

    fn get(&mut self, number: u32) -> Option<&mut Connection> {
        let place = self.places.get_mut(number as usize & 0xffff)?.as_deref_mut()?;
        (place.number == number).then_some(place)
    }

    fn greeting(&mut self, from: SocketAddr, nonce: u64, bytes: &mut [u8]) -> Arrived<'_> {
        let counter = Header::decode(bytes).expect("the header was checked").counter.get();
        let (clear, _) = GreetingBytes::read_from_prefix(&bytes[HEADER..]).expect("the length was checked");
        let again = self.greeted.get(&clear.random).copied();
        if let Some(place) = again {
            let connection =
                self.places[usize::from(place)].as_ref().expect("a connection in the map exists");
            // A client that has proved that it has the keys sends no more greetings, so this one is a replay.
            if connection.peer != from || connection.is_confirmed || counter < connection.greetings {
                return self.drop(Unopened::Replayed);
            }
        }
        let found = (self.find)(clear.name.get());
        let shared = found.as_ref().unwrap_or(&self.decoy);
        let opened = Opener::new(shared.greeting(&clear.random)).open(bytes, GREETING_CLEAR);
        let (Ok(sealed), Some(shared)) = (opened, &found) else {
            count(&mut self.dropped, Unopened::Forged);
            return Arrived::Outsider(nonce, Outsider::WrongSeal);
        };
        let (len, said) = sealed.split_at(2);
        let len = usize::from(u16::from_le_bytes([len[0], len[1]]));
        if len > DATAGRAM_MIN {
            return self.drop(Unopened::Forged);
        }
        self.said.clear();
        self.said.extend_from_slice(&said[..len.min(GREETING_SEALED - 2)]);
        self.said.resize(len, 0);
        let place = match again {
            Some(place) => place,
            None => match self.connect(from, shared, clear.random) {
                Some(place) => place,
                None => return Arrived::Nothing, // The client retries, and there may be space by then.
            },
        };
        let connection = self.places[usize::from(place)].as_mut().expect("the connection exists");
        connection.greetings = counter + 1;
        Arrived::Datagram(connection.number, &self.said)
    }

    /// Creates a connection. Returns `None` if there are too many connections, and none of them may be forgotten.
    fn connect(&mut self, peer: SocketAddr, shared: &Shared, client: Random) -> Option<u16> {
        while self.connections() >= CONNECTIONS_MAX {
            if !self.forget_oldest() {
                return None;
            }
        }
        let node = (self.random)();
        let place = self.vacant.pop().unwrap_or(self.places.len() as u16);
        if usize::from(place) == self.places.len() {
            self.places.push(None);
        }
        // The generation differs, most likely, from that of the previous connection in this place. It is not 0, since
        // connection number 0 means none.
        let generation = u32::from(u16::from_le_bytes([node[0], node[1]]).max(1));
        let [to_node, to_client] = shared.connection(&client, &node);
        self.places[usize::from(place)] = Some(Box::new(Connection {
            number: generation << 16 | u32::from(place),
            peer,
            random: [client, node],
            greetings: 0,
            is_confirmed: false,
            stranger_since: None,
            sealer: Sealer::new(to_client),
            opener: Opener::new(to_node),
        }));
        self.greeted.insert(client, place);
        Some(place)
    }

    /// Forgets the oldest connection without a session. Returns false if there is none.
    fn forget_oldest(&mut self) -> bool {
        while let Some((number, since)) = self.strangers.pop_front() {
            let is_stranger =
                self.get(number).is_some_and(|connection| connection.stranger_since == Some(since));
            if is_stranger {
                let place = number as u16;
                let connection = self.places[usize::from(place)].take().expect("the connection exists");
                self.greeted.remove(&connection.random[0]);
                self.vacant.push(place);
                return true;
            }
        }
        false
    }
}
