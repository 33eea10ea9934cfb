//! TLS between the stream and the frames: what travels can be neither read nor changed, and the client knows that it
//! is the node.
//!
//! Version 1.3 alone, by `rustls`, which is handed bytes and hands out bytes: it has no socket and waits for nothing.
//! A client agrees with the node while it connects. At a port the handshake goes on whenever the poll tells of the
//! connection, a few connections at a time; whoever does not come to its end has no session, and is hung up on like
//! others that have none.
//!
//! Invariant: what was taken in one turn leaves as few records as can hold it, in one write.
//! Invariant: nothing is kept of a session that has ended: each has keys of its own.
//! Invariant: no frame is handed on, and none leaves, before the handshake is over.

use super::line::{CONNECT_WAIT, dial};
use super::port::StreamPort;
use super::{End, Inbox, Outbox, READ_MAX, StreamLine, Wire, put_frame};
use rustix::event::{PollFd, PollFlags, poll};
use rustls::client::{ClientConnectionData, Resumption, UnbufferedClientConnection};
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus, WriteTraffic};
use rustls::{CertificateError, ClientConfig, Error, RootCertStore, ServerConfig};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

/// The protocol within, so that a node's certificate serves for nothing else.
const ALPN: &[u8] = b"farside";
/// The most bytes that a record holds.
const RECORD_MAX: usize = 16 * 1024;
/// What a record adds to what it holds, and some more.
const RECORD_EXTRA: usize = 64;
/// Bytes of records that are kept because more is needed. A handshake of ours has less.
const HELD_MAX: usize = 2 * RECORD_MAX;

const _: () = assert!(HELD_MAX > RECORD_MAX + 256 + 5, "the beginning of a record is kept");
const _: () = assert!(READ_MAX > 2 * HELD_MAX, "what is kept leaves room to read its rest");

/// What a node shows of itself: a certificate, and the key to it. Cheap to clone.
#[derive(Clone)]
pub struct Identity(Arc<ServerConfig>);

/// One that was read anew is another.
impl PartialEq for Identity {
    fn eq(&self, other: &Identity) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Identity {}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Identity(not shown)")
    }
}

/// Why there is no identity: what is wrong with the one or the other, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdentityError {
    /// With the certificate.
    Certificate(String),
    /// With the key.
    Key(String),
}

impl Identity {
    /// The identity that these texts hold, in PEM: a certificate, with those who signed it if there are any, and its
    /// private key.
    ///
    /// # Errors
    /// [`IdentityError`].
    pub fn from_pem(certificates: &[u8], key: &[u8]) -> Result<Identity, IdentityError> {
        let chain = certificates_of(certificates).map_err(IdentityError::Certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| {
            IdentityError::Key(match error {
                PemError::NoItemsFound => "holds no private key: name the file of the certificate's".into(),
                error => format!("is no PEM ({error}): name the file of the certificate's private key"),
            })
        })?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("the provider has suites of TLS 1.3")
            .with_no_client_auth()
            .with_single_cert(chain, key);
        let mut config = config.map_err(|error| match error {
            Error::InconsistentKeys(_) => IdentityError::Key(
                "is not the key to the certificate: name the one that was made with it".into(),
            ),
            Error::InvalidCertificate(_) => IdentityError::Certificate(format!("cannot be used: {error}")),
            error => IdentityError::Key(format!("cannot be used: {error}")),
        })?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        // A client connects seldom: what would spare it a handshake is not worth being kept for all who came.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Identity(Arc::new(config)))
    }
}

/// Whom a client believes: certificates of nodes, or of those who sign them. Cheap to clone.
#[derive(Clone)]
pub struct Trust(Arc<ClientConfig>);

impl Trust {
    /// Trust in these certificates, in PEM.
    ///
    /// # Errors
    /// The text holds none, or one that cannot be used; says the remedy.
    pub fn from_pem(certificates: &[u8]) -> Result<Trust, String> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates_of(certificates)? {
            roots
                .add(certificate)
                .map_err(|error| format!("holds a certificate that cannot be used: {error}"))?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("the provider has suites of TLS 1.3")
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.resumption = Resumption::disabled();
        Ok(Trust(Arc::new(config)))
    }
}

fn certificates_of(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| format!("is no PEM ({error}): name a file of certificates"))?;
    if found.is_empty() {
        return Err("holds no certificate: name a file of certificates in PEM".into());
    }
    Ok(found)
}

/// A host's name, as its certificate has it.
#[derive(Clone, Debug)]
pub struct HostName(ServerName<'static>);

impl HostName {
    /// A name or an address, without a port.
    ///
    /// # Errors
    /// It is neither.
    pub fn parse(name: &str) -> Result<HostName, String> {
        let parsed = ServerName::try_from(name.trim_matches(['[', ']']));
        let parsed = parsed.map_err(|_| format!("'{name}' is no name or address of a host"))?;
        Ok(HostName(parsed.to_owned()))
    }
}

/// Why there is no connection by TLS. Its text says the remedy. Nothing was sent that anybody could read.
#[derive(Debug)]
pub enum ConnectError {
    /// There is no connection at all.
    System(std::io::Error),
    /// The node's certificate is not believed.
    Untrusted(CertificateError),
    /// There was no end of the handshake within a second.
    Silent,
    /// The other side hung up in the handshake.
    HungUp,
    /// The handshake failed otherwise.
    Failed(Error),
}

impl std::fmt::Display for ConnectError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        use CertificateError::*;
        match self {
            ConnectError::System(error) => {
                write!(f, "no node can be reached: {error}; look whether one serves there")
            }
            ConnectError::Untrusted(UnknownIssuer | BadSignature) => f.write_str(
                "the node's certificate is none of those that are trusted, nor signed by one: look whether it is the \
                 node that is meant, and name its certificate, or its signer's, by --tls-ca",
            ),
            ConnectError::Untrusted(Expired | ExpiredContext { .. }) => f.write_str(
                "the node's certificate has expired: have it serve with a new one, such as 'farside tls new' makes, \
                 or set this machine's clock",
            ),
            ConnectError::Untrusted(NotValidYet | NotValidYetContext { .. }) => f.write_str(
                "the node's certificate is not valid yet: set the clock, of this machine or of the one that made it",
            ),
            ConnectError::Untrusted(NotValidForNameContext { expected, presented }) => write!(
                f,
                "the node's certificate is not for '{}': connect by a name that it has ({}), or have one made for this \
                 one, by 'farside tls new --host {0}'",
                expected.to_str(),
                presented.join(", ")
            ),
            ConnectError::Untrusted(error) => {
                write!(f, "the node's certificate cannot be trusted ({error}): have it serve with another")
            }
            ConnectError::Silent => write!(
                f,
                "no node answered within {} ms: look whether one serves tls:// there, and whether it is stopped",
                CONNECT_WAIT.as_millis()
            ),
            ConnectError::HungUp => f.write_str(
                "it hung up instead of speaking TLS: look whether a node serves tls:// there; one that serves tcp:// \
                 is named so",
            ),
            ConnectError::Failed(Error::InvalidMessage(_)) => f.write_str(
                "what serves there does not speak TLS: look whether a node serves tls:// there; one that serves \
                 tcp:// is named so",
            ),
            ConnectError::Failed(error) => {
                write!(f, "TLS could not be agreed on ({error}): use the same release on both sides")
            }
        }
    }
}

impl std::error::Error for ConnectError {}

impl From<End> for ConnectError {
    fn from(end: End) -> ConnectError {
        match end {
            End::Tls(Error::InvalidCertificate(error)) => ConnectError::Untrusted(error),
            End::Tls(error) => ConnectError::Failed(error),
            End::System(error) if error.kind() != ErrorKind::ConnectionReset => ConnectError::System(error),
            End::System(_) | End::HungUp | End::Foreign | End::Encrypted => ConnectError::HungUp,
        }
    }
}

/// A client's end of TLS.
pub type TlsLine = StreamLine<Tls<UnbufferedClientConnection>>;

impl TlsLine {
    /// Connects to the node at `node`, which is to show that it is `name`. Waits about a second at most.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect(node: SocketAddr, name: &HostName, trust: &Trust) -> Result<TlsLine, ConnectError> {
        let until = Instant::now() + CONNECT_WAIT;
        let stream = dial(node).map_err(ConnectError::System)?;
        let session = UnbufferedClientConnection::new(Arc::clone(&trust.0), name.0.clone());
        let mut wire = Tls::new(session.map_err(ConnectError::Failed)?);
        wire.flush(&stream)?;
        let mut buffer = vec![0; READ_MAX];
        while !wire.is_ready() || wire.unwritten() > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ConnectError::Silent);
            }
            let out = if wire.unwritten() > 0 { PollFlags::OUT } else { PollFlags::empty() };
            let mut fds = [PollFd::new(&stream, PollFlags::IN | out)];
            let _interrupted_or_not = poll(&mut fds, Some(&crate::timer::timespec(left)));
            wire.flush(&stream)?;
            // An engine says nothing before it was greeted.
            wire.receive(&stream, &mut buffer, |_| {})?;
        }
        StreamLine::over(stream, wire).map_err(ConnectError::System)
    }
}

/// An engine's end of TLS.
pub type TlsPort = StreamPort<Tls<UnbufferedServerConnection>>;

impl TlsPort {
    /// Ports for so many engines, all at one address, each of which shows `identity`.
    ///
    /// # Errors
    /// The system's: the address is none of this machine's, or another has it.
    pub fn bind(address: SocketAddr, engines: usize, identity: &Identity) -> std::io::Result<Vec<TlsPort>> {
        let identity = identity.clone();
        StreamPort::bind_with(address, engines, move || {
            let session = UnbufferedServerConnection::new(Arc::clone(&identity.0));
            Tls::new(session.expect("what is set has been checked"))
        })
    }
}

/// One side's half of the protocol.
pub trait Session: Send {
    /// What the library knows of that side.
    type Data;

    /// Takes in records, and says what is to be done next.
    fn process<'c, 'i>(&'c mut self, records: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data>;

    /// Whether the handshake is not over.
    fn is_handshaking(&self) -> bool;
}

impl Session for UnbufferedClientConnection {
    type Data = ClientConnectionData;

    fn process<'c, 'i>(&'c mut self, records: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(records)
    }

    fn is_handshaking(&self) -> bool {
        (**self).is_handshaking()
    }
}

impl Session for UnbufferedServerConnection {
    type Data = ServerConnectionData;

    fn process<'c, 'i>(&'c mut self, records: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(records)
    }

    fn is_handshaking(&self) -> bool {
        (**self).is_handshaking()
    }
}

/// Frames by TLS.
pub struct Tls<S> {
    session: Box<S>,
    /// The beginning of a record, or of a message of several.
    records: Inbox,
    /// The beginning of a frame.
    frames: Inbox,
    /// Frames that wait to become records.
    plain: Vec<u8>,
    /// Records on their way out.
    outbox: Outbox,
}

impl<S: Session> Tls<S> {
    fn new(session: S) -> Tls<S> {
        Tls {
            session: Box::new(session),
            records: Inbox::default(),
            frames: Inbox::default(),
            plain: Vec::new(),
            outbox: Outbox::default(),
        }
    }

    /// Has the library do what it can with `records`; how many bytes of them are done with. Frames that wait become
    /// records once they may.
    fn advance(&mut self, records: &mut [u8], mut take: impl FnMut(&[u8])) -> (usize, Result<(), End>) {
        let mut done_with = 0;
        loop {
            let (discard, step) = self.step(&mut records[done_with..], &mut take);
            done_with += discard;
            match step {
                Ok(true) => {}
                Ok(false) => return (done_with, Ok(())),
                Err(end) => return (done_with, Err(end)),
            }
        }
    }

    /// Has the library do the next thing. False if there is none before more has come.
    fn step(&mut self, records: &mut [u8], take: &mut impl FnMut(&[u8])) -> (usize, Result<bool, End>) {
        let Tls { session, frames, plain, outbox, .. } = self;
        let UnbufferedStatus { mut discard, state } = session.process(records);
        let step = match state {
            Ok(ConnectionState::ReadTraffic(mut traffic)) => loop {
                let Some(record) = traffic.next_record() else { break Ok(true) };
                let fed = record.map_err(End::Tls).and_then(|record| {
                    discard += record.discard;
                    frames.feed(record.payload, &mut *take)
                });
                if let Err(end) = fed {
                    break Err(end);
                }
            },
            Ok(ConnectionState::EncodeTlsData(mut message)) => {
                outbox.extend(0, |room| match message.encode(room) {
                    Ok(len) => Ok(len),
                    Err(EncodeError::InsufficientSize(size)) => Err(size.required_size),
                    Err(EncodeError::AlreadyEncoded) => unreachable!("it is encoded once"),
                });
                Ok(true)
            }
            Ok(ConnectionState::TransmitTlsData(message)) => {
                message.done(); // It leaves with the next flush.
                Ok(true)
            }
            Ok(ConnectionState::WriteTraffic(traffic)) => encrypt(traffic, plain, outbox).map(|()| false),
            Ok(ConnectionState::BlockedHandshake) => Ok(false),
            Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Err(End::HungUp),
            Ok(_) => Err(End::Foreign), // Data before the handshake is over: neither side of ours grants that.
            Err(error) => Err(End::Tls(error)),
        };
        (discard, step)
    }
}

/// Makes records of what waits in `plain`.
fn encrypt<D>(mut traffic: WriteTraffic<'_, D>, plain: &mut Vec<u8>, outbox: &mut Outbox) -> Result<(), End> {
    if plain.is_empty() {
        return Ok(());
    }
    let mut exhausted = false;
    let expected = plain.len() + (plain.len() / RECORD_MAX + 1) * RECORD_EXTRA;
    outbox.extend(expected, |room| match traffic.encrypt(plain, room) {
        Ok(len) => Ok(len),
        Err(EncryptError::InsufficientSize(size)) => Err(size.required_size),
        Err(EncryptError::EncryptExhausted) => {
            exhausted = true;
            Ok(0)
        }
    });
    plain.clear();
    plain.shrink_to(READ_MAX);
    if exhausted { Err(End::Tls(Error::EncryptError)) } else { Ok(()) }
}

impl<S: Session> Wire for Tls<S> {
    fn is_ready(&self) -> bool {
        !self.session.is_handshaking()
    }

    fn push(&mut self, frame: &[u8]) {
        put_frame(&mut self.plain, frame);
    }

    fn flush(&mut self, stream: &TcpStream) -> Result<(), End> {
        if !self.plain.is_empty() || !self.is_ready() {
            // What is kept was looked at when it came, and is not enough for anything.
            let mut kept = std::mem::take(&mut self.records.bytes);
            let mut is_late = false;
            let (done_with, advanced) = self.advance(&mut kept, |_| is_late = true);
            kept.drain(..done_with);
            self.records.bytes = kept;
            advanced?;
            if is_late {
                return Err(End::Foreign);
            }
        }
        self.outbox.flush(stream)
    }

    fn unwritten(&self) -> usize {
        self.outbox.len()
    }

    fn rest(&mut self) {
        if self.plain.is_empty() {
            self.plain.shrink_to(0);
        }
        self.outbox.rest();
    }

    fn receive(
        &mut self,
        stream: &TcpStream,
        buffer: &mut [u8],
        mut take: impl FnMut(&[u8]),
    ) -> Result<bool, End> {
        let Some(len) = self.records.read(stream, buffer)? else { return Ok(false) };
        let records = &mut buffer[..len];
        let (done_with, advanced) = self.advance(records, &mut take);
        let rest = &mut records[done_with..];
        if let Err(end) = advanced {
            if let End::Tls(_) = end {
                // Why, for the other side.
                let (_, _as_before) = self.step(rest, &mut take);
                let _unheard = self.outbox.flush(stream);
            }
            return Err(end);
        }
        if rest.len() > HELD_MAX {
            return Err(End::Foreign);
        }
        self.records.keep(rest);
        // What the handshake answers, and what waited for its end.
        self.outbox.flush(stream)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::fuzz::{self, Change, Executions};
    use std::net::TcpListener;
    use std::sync::LazyLock;

    type ClientEnd = Tls<UnbufferedClientConnection>;
    type ServerEnd = Tls<UnbufferedServerConnection>;

    static CERTIFICATE: LazyLock<(Identity, Trust)> = LazyLock::new(|| {
        let made = rcgen::generate_simple_self_signed(["node".to_owned()]).expect("a certificate");
        let (shown, key) = (made.cert.pem(), made.signing_key.serialize_pem());
        let identity = Identity::from_pem(shown.as_bytes(), key.as_bytes()).expect("an identity");
        (identity, Trust::from_pem(shown.as_bytes()).expect("certificates"))
    });

    fn ends() -> (ClientEnd, ServerEnd) {
        let name = HostName::parse("node").expect("a name").0;
        let client = UnbufferedClientConnection::new(Arc::clone(&CERTIFICATE.1.0), name);
        let server = UnbufferedServerConnection::new(Arc::clone(&CERTIFICATE.0.0));
        (Tls::new(client.expect("a client")), Tls::new(server.expect("a server")))
    }

    fn streams() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let ours = TcpStream::connect(listener.local_addr().expect("an address")).expect("it listens");
        let (theirs, _) = listener.accept().expect("it has come");
        for stream in [&ours, &theirs] {
            stream.set_nonblocking(true).expect("a socket");
        }
        (ours, theirs)
    }

    /// Two ends, a stream each, that have agreed.
    struct Pair {
        client: (ClientEnd, TcpStream),
        server: (ServerEnd, TcpStream),
        buffer: Vec<u8>,
    }

    impl Pair {
        fn new() -> Pair {
            let ((client, server), (ours, theirs)) = (ends(), streams());
            let mut pair =
                Pair { client: (client, ours), server: (server, theirs), buffer: vec![0; READ_MAX] };
            let Pair { client: (client, ours), server: (server, theirs), buffer } = &mut pair;
            client.flush(ours).expect("it can be written");
            while !client.is_ready() || !server.is_ready() {
                server.receive(theirs, buffer, |_| panic!("nothing was said")).expect("a handshake");
                client.receive(ours, buffer, |_| panic!("nothing was said")).expect("a handshake");
            }
            pair
        }
    }

    /// What one end gets of what the other was given.
    fn carried<A: Session, B: Session>(
        (from, out): &mut (Tls<A>, TcpStream),
        (to, into): &mut (Tls<B>, TcpStream),
        buffer: &mut [u8],
        frames: &[Vec<u8>],
    ) -> Vec<Vec<u8>> {
        frames.iter().for_each(|frame| from.push(frame));
        let mut got = Vec::new();
        while got.len() < frames.len() {
            from.flush(out).expect("it can be written");
            to.receive(into, buffer, |frame| got.push(frame.to_vec())).expect("records");
        }
        got
    }

    #[test]
    fn frames_arrive_whole_both_ways_and_idle_ends_hold_nothing() {
        let mut pair = Pair::new();
        let Pair { client, server, buffer } = &mut pair;
        for frames in [
            vec![b"one".to_vec(), Vec::new(), vec![7; 5000]],
            vec![vec![8; 16_000]; 40],
            vec![vec![9; crate::session::DATAGRAM_MAX]; 3],
            vec![b"last".to_vec()],
        ] {
            assert_eq!(carried(client, server, buffer, &frames), frames);
            assert_eq!(carried(server, client, buffer, &frames), frames);
        }
        for (frames, records) in
            [(&client.0.frames, &client.0.records), (&server.0.frames, &server.0.records)]
        {
            assert_eq!((frames.bytes.capacity(), records.bytes.capacity()), (0, 0));
        }
    }

    /// Records that leave, as anybody sees them: type, version, length.
    #[test]
    fn what_leaves_in_one_turn_is_as_few_records_as_can_hold_it() {
        let mut pair = Pair::new();
        let (client, _) = &mut pair.client;
        for (frames, records) in [(1, 1), (100, 1), (150, 1), (300, 2), (1500, 10)] {
            (0..frames).for_each(|_| client.push(&[1; 100]));
            let mut kept = Vec::new();
            let advanced = client.advance(&mut kept, |_| panic!("nothing came"));
            assert!(advanced.1.is_ok());
            let (mut seen, mut rest) = (0, &client.outbox.bytes[..]);
            while let [23, 3, 3, high, low, after @ ..] = rest {
                rest = &after[usize::from(u16::from_be_bytes([*high, *low]))..];
                seen += 1;
            }
            assert_eq!((seen, rest.len()), (records, 0), "{frames} frames");
            client.outbox.bytes.clear();
        }
    }

    #[test]
    fn keys_may_be_changed_at_any_time() {
        let mut pair = Pair::new();
        let Pair { client, server, buffer } = &mut pair;
        for turn in 0..20_u8 {
            let ConnectionState::WriteTraffic(traffic) =
                server.0.session.process(&mut []).state.expect("it has agreed")
            else {
                panic!("nothing else is to be done")
            };
            traffic.refresh_traffic_keys().expect("version 1.3");
            let frames = vec![vec![turn; 100]; 3];
            assert_eq!(carried(server, client, buffer, &frames), frames);
            assert_eq!(carried(client, server, buffer, &frames), frames);
        }
    }

    #[test]
    fn one_bit_that_was_changed_ends_it_and_hands_on_nothing() {
        let mut pair = Pair::new();
        let Pair { client: (client, _), server: (server, into), buffer } = &mut pair;
        client.push(b"pay 1");
        client.advance(&mut [], |_| {}).1.expect("a record");
        let (mut proxy, theirs) = streams();
        *into = theirs;
        let mut record = std::mem::take(&mut client.outbox.bytes);
        let last = record.len() - 20;
        record[last] ^= 1;
        std::io::Write::write_all(&mut proxy, &record).expect("it is small");
        let received = loop {
            match server.receive(into, buffer, |_| panic!("it was changed")) {
                Ok(false) => {}
                other => break other,
            }
        };
        assert!(matches!(received, Err(End::Tls(Error::DecryptError))), "{received:?}");
    }

    /// A greeting and what follows, changed anywhere and cut anyhow: it ends with an error, or waits for more.
    #[test]
    fn fuzz_handshakes() {
        let executions = Executions::of("handshakes of TLS");
        let mut first = ends().0;
        first.advance(&mut [], |_| {}).1.expect("a greeting");
        let greeting = first.outbox.bytes;
        let inputs = bolero::check!().with_test_time(fuzz::budget()).with_type().cloned();
        inputs.for_each(|(copies, step, changes): (u8, u16, Vec<Change>)| {
            executions.one_more();
            let mut bytes = greeting.repeat(1 + usize::from(copies % 3));
            fuzz::change(&mut bytes, &changes);
            let (_, mut server) = ends();
            let mut held = Vec::new();
            for part in bytes.chunks(1 + usize::from(step)) {
                held.extend_from_slice(part);
                let (done_with, advanced) = server.advance(&mut held, |_| panic!("no key was agreed on"));
                held.drain(..done_with);
                if advanced.is_err() || held.len() > HELD_MAX {
                    break;
                }
            }
            assert!(!server.is_ready(), "nobody has answered it");
        });
    }
}
