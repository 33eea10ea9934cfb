//! TLS between the stream and the frames: nobody on the path can read or change the traffic, and the client
//! authenticates the node.
//!
//! Only TLS 1.3 is used, by `rustls`, which converts bytes to bytes: it has no socket and never blocks. A client
//! completes the handshake while it connects. A port continues a handshake when epoll reports its connection, for a few
//! connections at a time. A connection whose handshake does not complete gets no session, and is closed like every
//! connection without one.
//!
//! Invariant: the frames of one round of the client core leave in the smallest number of records, in one write.
//! Invariant: each TLS session has its own keys, and nothing of a session is kept after it ends.
//! Invariant: no frame is passed on or sent before the handshake is complete.

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

/// The application protocol (ALPN), which prevents the use of a connection for any other protocol.
const ALPN: &[u8] = b"farside";
/// Maximum payload of a record in bytes.
const RECORD_MAX: usize = 16 * 1024;
/// Upper bound of the overhead of a record, in bytes.
const RECORD_EXTRA: usize = 64;
/// Maximum number of bytes of incomplete records that are kept. Our handshakes need less.
const HELD_MAX: usize = 2 * RECORD_MAX;

const _: () = assert!(HELD_MAX > RECORD_MAX + 256 + 5, "an incomplete record can be kept");
const _: () = assert!(READ_MAX > 2 * HELD_MAX, "an incomplete record leaves space for the rest");

/// A node's certificate and private key. Cheap to clone.
#[derive(Clone)]
pub struct Identity(Arc<ServerConfig>);

/// Two identities are equal only if one is a clone of the other, not if both were loaded from one file.
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

/// Why an identity could not be loaded: the invalid part, with the problem and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdentityError {
    /// The certificate is invalid; the text gives the problem and the remedy.
    Certificate(String),
    /// The key is invalid; the text gives the problem and the remedy.
    Key(String),
}

impl Identity {
    /// Parses an identity in PEM: a certificate, optionally with its chain, and its private key.
    ///
    /// # Errors
    /// [`IdentityError`] says which part is invalid, and why.
    pub fn from_pem(certificates: &[u8], key: &[u8]) -> Result<Identity, IdentityError> {
        let chain = certificates_of(certificates).map_err(IdentityError::Certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| {
            IdentityError::Key(match error {
                PemError::NoItemsFound => {
                    "holds no private key: name the file with the certificate's key".into()
                }
                error => format!("is not valid PEM ({error}): name the file with the certificate's key"),
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
        // Clients connect rarely: resumption would save too little to keep state for each.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Identity(Arc::new(config)))
    }
}

/// The certificates that a client trusts: those of nodes or of their signers. Cheap to clone.
#[derive(Clone)]
pub struct Trust(Arc<ClientConfig>);

impl Trust {
    /// Parses the trusted certificates, in PEM.
    ///
    /// # Errors
    /// The text holds no certificate, or one that cannot be used. The message names the remedy.
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
    let found = found.map_err(|error| format!("is not valid PEM ({error}): name a file of certificates"))?;
    if found.is_empty() {
        return Err("holds no certificate: name a file of certificates in PEM".into());
    }
    Ok(found)
}

/// A host's name as it appears in its certificate.
#[derive(Clone, Debug)]
pub struct HostName(ServerName<'static>);

impl HostName {
    /// Parses a name or an address, without a port.
    ///
    /// # Errors
    /// The text is neither a host name nor an IP address.
    pub fn parse(name: &str) -> Result<HostName, String> {
        let parsed = ServerName::try_from(name.trim_matches(['[', ']']));
        let parsed = parsed.map_err(|_| format!("'{name}' is not a host name or address"))?;
        Ok(HostName(parsed.to_owned()))
    }
}

/// Why there is no TLS connection. The message names a remedy. Nothing that an observer could read was sent.
#[derive(Debug)]
pub enum ConnectError {
    /// The connection could not be established.
    System(std::io::Error),
    /// The node's certificate is not trusted.
    Untrusted(CertificateError),
    /// The handshake was not complete within about 1 s.
    Silent,
    /// The peer hung up during the handshake.
    HungUp,
    /// The handshake failed for another reason.
    Failed(Error),
}

impl std::fmt::Display for ConnectError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        use CertificateError::*;
        match self {
            ConnectError::System(error) => {
                write!(f, "no node can be reached: {error}; check that one is running there")
            }
            ConnectError::Untrusted(UnknownIssuer | BadSignature) => f.write_str(
                "the node's certificate is not trusted, nor signed by a trusted one: check that this is the right \
                 node, and name its certificate, or its signer's, by --tls-ca",
            ),
            ConnectError::Untrusted(Expired | ExpiredContext { .. }) => f.write_str(
                "the node's certificate has expired: give the node a new one, such as 'farside tls new' makes, or \
                 set this machine's clock",
            ),
            ConnectError::Untrusted(NotValidYet | NotValidYetContext { .. }) => f.write_str(
                "the node's certificate is not valid yet: set the clock of this machine, or of the one that made it",
            ),
            ConnectError::Untrusted(NotValidForNameContext { expected, presented }) => write!(
                f,
                "the node's certificate is not for '{}': connect by a name that it has ({}), or make one for this \
                 name with 'farside tls new --host {0}'",
                expected.to_str(),
                presented.join(", ")
            ),
            ConnectError::Untrusted(error) => {
                write!(f, "the node's certificate cannot be trusted ({error}): give the node another one")
            }
            ConnectError::Silent => write!(
                f,
                "no node answered within {} ms: check that one serves tls:// there and is not stopped",
                CONNECT_WAIT.as_millis()
            ),
            ConnectError::HungUp => f.write_str(
                "the peer hung up instead of speaking TLS: check that a node serves tls:// there; if it serves \
                 tcp://, use that scheme",
            ),
            ConnectError::Failed(Error::InvalidMessage(_)) => f.write_str(
                "the peer does not speak TLS: check that a node serves tls:// there; if it serves tcp://, use that \
                 scheme",
            ),
            ConnectError::Failed(error) => {
                write!(f, "TLS negotiation failed ({error}): use the same release on both sides")
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

/// A client's end of a TLS connection.
pub type TlsLine = StreamLine<Tls<UnbufferedClientConnection>>;

impl TlsLine {
    /// Connects to the node at `node`, whose certificate must prove that it is `name`. Waits at most about 1 s.
    ///
    /// # Errors
    /// [`ConnectError`] says why there is no connection.
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
            // An engine sends no frame before the session's hello.
            wire.receive(&stream, &mut buffer, |_| {})?;
        }
        StreamLine::over(stream, wire).map_err(ConnectError::System)
    }
}

/// An engine's port for TLS connections.
pub type TlsPort = StreamPort<Tls<UnbufferedServerConnection>>;

impl TlsPort {
    /// Creates `engines` ports at one address, one per engine, with the certificate of `identity`.
    ///
    /// # Errors
    /// The system's error: the address is not of this machine, or is in use.
    pub fn bind(address: SocketAddr, engines: usize, identity: &Identity) -> std::io::Result<Vec<TlsPort>> {
        let identity = identity.clone();
        StreamPort::bind_with(address, engines, move || {
            let session = UnbufferedServerConnection::new(Arc::clone(&identity.0));
            Tls::new(session.expect("the configuration was checked"))
        })
    }
}

/// The TLS protocol of one side, the client or the node.
pub trait Session: Send {
    /// Type that `rustls` uses for this side's connection data.
    type Data;

    /// Processes records; returns the next step to take.
    fn process<'c, 'i>(&'c mut self, records: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data>;

    /// Whether the handshake is incomplete.
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

/// A wire with encryption: frames pass through the stream in TLS records.
pub struct Tls<S> {
    session: Box<S>,
    /// Received bytes of an incomplete record, or of an incomplete message of several records.
    records: Inbox,
    /// Decrypted bytes of an incomplete frame.
    frames: Inbox,
    /// Frames that wait to be encrypted.
    plain: Vec<u8>,
    /// Records that wait to be written.
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

    /// Processes `records` until more input is needed. Returns the number of bytes consumed. Once the handshake is
    /// complete, also encrypts queued frames.
    fn advance(&mut self, records: &mut [u8], mut take: impl FnMut(&[u8])) -> (usize, Result<(), End>) {
        let mut consumed = 0;
        loop {
            let (discard, step) = self.step(&mut records[consumed..], &mut take);
            consumed += discard;
            match step {
                Ok(true) => {}
                Ok(false) => return (consumed, Ok(())),
                Err(end) => return (consumed, Err(end)),
            }
        }
    }

    /// Takes one step of the protocol. Returns the number of bytes consumed, and false if the next step needs more
    /// input.
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
                    Err(EncodeError::AlreadyEncoded) => unreachable!("each message is encoded once"),
                });
                Ok(true)
            }
            Ok(ConnectionState::TransmitTlsData(message)) => {
                message.done(); // Written by the next flush.
                Ok(true)
            }
            Ok(ConnectionState::WriteTraffic(traffic)) => encrypt(traffic, plain, outbox).map(|()| false),
            Ok(ConnectionState::BlockedHandshake) => Ok(false),
            Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Err(End::HungUp),
            Ok(_) => Err(End::Foreign), // Early data, which we never enable.
            Err(error) => Err(End::Tls(error)),
        };
        (discard, step)
    }
}

/// Encrypts the frames in `plain` into records.
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
            // The kept bytes were already processed on arrival, and are incomplete without further ones.
            let mut kept = std::mem::take(&mut self.records.bytes);
            let mut is_late = false;
            let (consumed, advanced) = self.advance(&mut kept, |_| is_late = true);
            kept.drain(..consumed);
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
        let (consumed, advanced) = self.advance(records, &mut take);
        let rest = &mut records[consumed..];
        if let Err(end) = advanced {
            if let End::Tls(_) = end {
                // One more step encodes the alert that tells the peer the reason.
                let (_, _as_before) = self.step(rest, &mut take);
                let _unheard = self.outbox.flush(stream);
            }
            return Err(end);
        }
        if rest.len() > HELD_MAX {
            return Err(End::Foreign);
        }
        self.records.keep(rest);
        // This sends handshake responses, and the frames that waited for the end of the handshake.
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
        let ours = TcpStream::connect(listener.local_addr().expect("an address")).expect("the port listens");
        let (theirs, _) = listener.accept().expect("a connection");
        for stream in [&ours, &theirs] {
            stream.set_nonblocking(true).expect("a socket");
        }
        (ours, theirs)
    }

    /// Two ends after the handshake, each with a stream.
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
            client.flush(ours).expect("the stream has space");
            while !client.is_ready() || !server.is_ready() {
                server.receive(theirs, buffer, |_| panic!("no frame was sent")).expect("a handshake");
                client.receive(ours, buffer, |_| panic!("no frame was sent")).expect("a handshake");
            }
            pair
        }
    }

    /// Sends `frames` from one end, and returns the frames that the other end receives.
    fn carried<A: Session, B: Session>(
        (from, out): &mut (Tls<A>, TcpStream),
        (to, into): &mut (Tls<B>, TcpStream),
        buffer: &mut [u8],
        frames: &[Vec<u8>],
    ) -> Vec<Vec<u8>> {
        frames.iter().for_each(|frame| from.push(frame));
        let mut got = Vec::new();
        while got.len() < frames.len() {
            from.flush(out).expect("the stream has space");
            to.receive(into, buffer, |frame| got.push(frame.to_vec())).expect("records");
        }
        got
    }

    #[test]
    fn frames_arrive_complete_and_idle_ends_hold_no_memory() {
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

    /// Parses the outgoing records as an observer would, by their type, version and length.
    #[test]
    fn frames_of_one_turn_leave_in_the_fewest_records() {
        let mut pair = Pair::new();
        let (client, _) = &mut pair.client;
        for (frames, records) in [(1, 1), (100, 1), (150, 1), (300, 2), (1500, 10)] {
            (0..frames).for_each(|_| client.push(&[1; 100]));
            let mut kept = Vec::new();
            let advanced = client.advance(&mut kept, |_| panic!("no frame was sent"));
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
    fn a_peer_may_change_its_keys_at_any_time() {
        let mut pair = Pair::new();
        let Pair { client, server, buffer } = &mut pair;
        for turn in 0..20_u8 {
            let ConnectionState::WriteTraffic(traffic) =
                server.0.session.process(&mut []).state.expect("the handshake is complete")
            else {
                panic!("no other step is due")
            };
            traffic.refresh_traffic_keys().expect("version 1.3");
            let frames = vec![vec![turn; 100]; 3];
            assert_eq!(carried(server, client, buffer, &frames), frames);
            assert_eq!(carried(client, server, buffer, &frames), frames);
        }
    }

    #[test]
    fn one_changed_bit_ends_the_connection_without_a_frame() {
        let mut pair = Pair::new();
        let Pair { client: (client, _), server: (server, into), buffer } = &mut pair;
        client.push(b"pay 1");
        client.advance(&mut [], |_| {}).1.expect("a record");
        let (mut proxy, theirs) = streams();
        *into = theirs;
        let mut record = std::mem::take(&mut client.outbox.bytes);
        let last = record.len() - 20;
        record[last] ^= 1;
        std::io::Write::write_all(&mut proxy, &record).expect("the stream has space");
        let received = loop {
            match server.receive(into, buffer, |_| panic!("the record was changed")) {
                Ok(false) => {}
                other => break other,
            }
        };
        assert!(matches!(received, Err(End::Tls(Error::DecryptError))), "{received:?}");
    }

    /// Passes a mutated client hello in pieces of any size: the server fails or waits for more.
    #[test]
    fn fuzz_handshakes() {
        let executions = Executions::of("handshakes of TLS");
        let mut first = ends().0;
        first.advance(&mut [], |_| {}).1.expect("a client hello");
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
                let (consumed, advanced) = server.advance(&mut held, |_| panic!("no key was negotiated"));
                held.drain(..consumed);
                if advanced.is_err() || held.len() > HELD_MAX {
                    break;
                }
            }
            assert!(!server.is_ready(), "the client never responded");
        });
    }
}
