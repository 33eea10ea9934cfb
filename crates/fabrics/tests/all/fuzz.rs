//! Fuzz targets for received bytes: datagrams of sessions at both ends, sealed datagrams, and frames of the Unix
//! socket.
//!
//! Sessions are fuzzed with their state: a real client talks to a real server. Datagrams between them are changed,
//! duplicated, lost or replayed, some with a correct checksum and some without.
//!
//! The tests check that nothing panics or loops for ever, that memory is bounded, and that a valid client can open a
//! session afterwards.

#[path = "../../../remote/tests/support/fuzz.rs"]
mod driver;

use driver::{Change, Executions, budget, change};
use farside_fabrics::session::client::{self, Ask, Client, Event, SlotRef};
use farside_fabrics::session::server::{self, End, Hello, Host, Outcome, Request, RequestRef, Server};
use farside_fabrics::shm::frame;
use farside_fabrics::udp::seal;
use farside_fabrics::udp::seal::node::Arrived;
use farside_remote::Addr;
use farside_remote::fabric::ServiceId;
use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

/// A host that runs any request.
#[derive(Default)]
struct Runner {
    secrets: u64,
    later: Vec<RequestRef>,
    open: i64,
}

impl Host for Runner {
    type Session = ();

    fn secret(&mut self) -> u64 {
        self.secrets += 1;
        self.secrets.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
    fn open(&mut self, hello: &Hello<'_>) -> Result<(), String> {
        if hello.token.first() == Some(&b'?') {
            return Err("no ".repeat(500));
        }
        self.open += 1;
        Ok(())
    }
    fn run(&mut self, _: &mut (), at: RequestRef, request: Request<'_>, reply: &mut Vec<u8>) -> Outcome {
        match request {
            Request::Chain(bytes) => reply.resize(bytes.len() * 9 % 65_536, 1),
            Request::Call(ServiceId(0..=9), bytes) => reply.extend_from_slice(bytes),
            Request::Call(..) => {
                self.later.push(at);
                return Outcome::Later;
            }
            Request::Retire(buffers) => reply.resize(buffers.count() % 9, 2),
        }
        Outcome::Done
    }
    fn close(&mut self, (): (), _: End) {
        self.open -= 1;
    }
}

#[derive(Clone, Debug, bolero::TypeGenerator)]
enum Step {
    /// Submit a chain of this size in bytes.
    Chain(u16),
    /// Submit a call of this size in bytes. If the flag is true, the response comes later.
    Call(u16, bool),
    Retire(u8),
    Release,
    Cancel(u8),
    Close,
    Wait(u16),
    Expire,
    AnswerLater(u16),
    HangUp(u8),
    /// Deliver the client's next datagram to the server: the address it seems to come from, the changes to it, and
    /// whether its checksum is then corrected.
    ToServer(u8, Vec<Change>, bool),
    ToClient(Vec<Change>, bool),
    /// Exchange all pending datagrams unchanged.
    Talk,
    /// Replay an earlier datagram to the server: its index, its address, the changes, and whether its checksum is
    /// corrected.
    AgainToServer(u8, u8, Vec<Change>, bool),
    AgainToClient(u8, Vec<Change>, bool),
    /// Deliver these bytes to both ends. The flag says whether their checksum is corrected.
    Bytes(Vec<u8>, bool),
    /// Deliver another client's hello, with this identity and this incarnation.
    Another(u8, u8),
}

fn repair(bytes: &mut [u8]) {
    if bytes.len() >= 24 {
        let secrets = RapidSecrets::seed(0x6661_7273_6964_6501);
        let mut head = bytes[..16].to_vec();
        head.extend_from_slice(&rapidhash_v3_seeded(&bytes[24..], &secrets).to_le_bytes());
        let check = rapidhash_v3_seeded(&head, &secrets);
        bytes[16..24].copy_from_slice(&check.to_le_bytes());
    }
}

struct Talk {
    now: Duration,
    client: Client,
    server: Server<u8, Runner>,
    host: Runner,
    said: Vec<Vec<u8>>,
    heard: Vec<Vec<u8>>,
    held: Vec<SlotRef>,
    asked: Vec<SlotRef>,
    out: Vec<u8>,
    is_reliable: bool,
}

const SESSIONS: usize = 4;
const HERE: u8 = 0;

impl Talk {
    fn client(identity: u128, incarnation: u64, is_reliable: bool) -> client::Config {
        let token = if incarnation % 7 == 6 { b"?".to_vec() } else { b"token".to_vec() };
        let datagram = [1200, 1208, 1400, 4000, 16 * 1024][incarnation as usize % 5];
        client::Config {
            identity,
            incarnation,
            nonce: 77,
            is_reliable,
            token,
            datagram,
            ..client::Config::default()
        }
    }

    fn new(is_reliable: bool, incarnation: u8) -> Talk {
        let config = server::Config { sessions_max: SESSIONS, is_reliable, ..server::Config::default() };
        let now = Duration::from_millis(1);
        Talk {
            now,
            client: Client::new(now, Talk::client(1, incarnation.into(), is_reliable)),
            server: Server::new(config),
            host: Runner::default(),
            said: Vec::new(),
            heard: Vec::new(),
            held: Vec::new(),
            asked: Vec::new(),
            out: Vec::new(),
            is_reliable,
        }
    }

    fn send_server(&mut self, from: u8, mut bytes: Vec<u8>, changes: &[Change], is_sealed: bool) {
        change(&mut bytes, changes);
        if is_sealed {
            repair(&mut bytes);
        }
        let _refused_is_counted = self.server.receive(self.now, from, &bytes, &mut self.host);
    }

    fn send_client(&mut self, mut bytes: Vec<u8>, changes: &[Change], is_sealed: bool) {
        change(&mut bytes, changes);
        if is_sealed {
            repair(&mut bytes);
        }
        let _refused_is_counted = self.client.receive(self.now, &bytes);
    }

    fn client_says(&mut self) -> Option<Vec<u8>> {
        let says = self.client.transmit(self.now, &mut self.out);
        says.then(|| {
            self.said.push(self.out.clone());
            self.out.clone()
        })
    }

    fn server_says(&mut self) -> Option<(u8, Vec<u8>)> {
        let to = self.server.transmit(&mut self.out)?;
        assert!(self.out.len() >= 24 && self.out.len() <= 65_507);
        self.heard.push(self.out.clone());
        Some((to, self.out.clone()))
    }

    fn talk(&mut self) {
        for round in 0..10_000 {
            assert!(round < 9999, "the exchange never ends");
            let mut is_quiet = true;
            while let Some(bytes) = self.client_says() {
                is_quiet = false;
                self.send_server(HERE, bytes, &[], false);
            }
            while let Some((to, bytes)) = self.server_says() {
                is_quiet = false;
                if to == HERE {
                    self.send_client(bytes, &[], false);
                }
            }
            self.hear();
            if is_quiet {
                return;
            }
        }
    }

    fn hear(&mut self) {
        while let Some(event) = self.client.next_event() {
            if let Event::Answered { request, .. } = event {
                assert!(self.client.reply(request).len() <= 65_600);
                self.held.push(request);
            }
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Chain(size) => {
                self.asked.extend(self.client.submit(self.now, Ask::Chain, &[&vec![1; (*size).into()]]));
            }
            Step::Call(size, is_later) => {
                let ask = Ask::Call(ServiceId(if *is_later { 99 } else { 1 }));
                let size = usize::from(*size).min(60_000);
                self.asked.extend(self.client.submit(self.now, ask, &[b"part", &vec![1; size]]));
            }
            Step::Retire(count) => {
                let buffers = vec![(1, Addr::new(64)); (*count).into()];
                let _no_room = self.client.retire(self.now, &buffers);
            }
            Step::Release => {
                if let Some(request) = self.held.pop() {
                    self.client.release(request);
                }
            }
            Step::Cancel(which) => {
                if !self.asked.is_empty() {
                    let request = self.asked.swap_remove(usize::from(*which) % self.asked.len());
                    let _fate = self.client.cancel(request);
                    self.held.retain(|&held| held != request);
                }
            }
            Step::Close => self.client.close(),
            Step::Wait(ms) => self.now += Duration::from_millis((*ms).into()),
            Step::Expire => self.server.expire(self.now, &mut self.host),
            Step::AnswerLater(size) => {
                if let Some(request) = self.host.later.pop() {
                    self.server.answer(request, &vec![3; (*size).into()]);
                }
            }
            Step::HangUp(address) => self.server.hang_up(*address % 3, &mut self.host),
            Step::ToServer(from, changes, is_sealed) => {
                if let Some(bytes) = self.client_says() {
                    self.send_server(*from % 3, bytes, changes, *is_sealed);
                }
            }
            Step::ToClient(changes, is_sealed) => {
                if let Some((_, bytes)) = self.server_says() {
                    self.send_client(bytes, changes, *is_sealed);
                }
            }
            Step::Talk => self.talk(),
            Step::AgainToServer(which, from, changes, is_sealed) => {
                if !self.said.is_empty() {
                    let bytes = self.said[usize::from(*which) % self.said.len()].clone();
                    self.send_server(*from % 3, bytes, changes, *is_sealed);
                }
            }
            Step::AgainToClient(which, changes, is_sealed) => {
                if !self.heard.is_empty() {
                    let bytes = self.heard[usize::from(*which) % self.heard.len()].clone();
                    self.send_client(bytes, changes, *is_sealed);
                }
            }
            Step::Bytes(bytes, is_sealed) => {
                self.send_server(1, bytes.clone(), &[], *is_sealed);
                self.send_client(bytes.clone(), &[], *is_sealed);
            }
            Step::Another(identity, incarnation) => {
                let config = Talk::client((*identity % 6).into(), (*incarnation).into(), self.is_reliable);
                let mut another = Client::new(self.now, config);
                if another.transmit(self.now, &mut self.out) {
                    self.send_server(1 + identity % 2, self.out.clone(), &[], false);
                }
            }
        }
        self.hear();
        // At most one reply and one request per slot of each session.
        let bound = SESSIONS * 64 * 2 * 66_000 + (64 << 17) * 2;
        assert!(self.server.kept_bytes() <= bound, "{}", self.server.kept_bytes());
        assert!(self.client.kept_bytes() <= bound && self.client.outstanding() <= 1 << 30);
        assert!(self.server.sessions() <= SESSIONS && self.server.sessions() as i64 == self.host.open);
    }
}

fn talk(name: &'static str, is_reliable: bool) {
    let executions = Executions::of(name);
    let inputs = bolero::check!().with_test_time(budget()).with_max_len(16 << 10).with_type().cloned();
    inputs.for_each(|(incarnation, opens, steps): (u8, bool, Vec<Step>)| {
        executions.one_more();
        let mut talk = Talk::new(is_reliable, incarnation);
        if opens {
            talk.talk();
        }
        steps.iter().for_each(|step| talk.step(step));
        // After any history, a new client is served once silent sessions have expired.
        talk.now += Duration::from_secs(60);
        talk.server.expire(talk.now, &mut talk.host);
        assert_eq!(talk.server.sessions(), 0);
        while talk.server_says().is_some() {}
        talk.client =
            Client::new(talk.now, client::Config { nonce: 5, ..Talk::client(1 << 90, 1, is_reliable) });
        talk.client_says().into_iter().for_each(|hello| talk.send_server(HERE, hello, &[], false));
        assert_eq!(talk.server.sessions(), 1, "a valid client gets a session");
    });
}

#[test]
fn fuzz_sessions_by_datagrams() {
    talk("sessions by datagrams", false);
}

#[test]
fn fuzz_sessions_by_a_reliable_carrier() {
    talk("sessions by a reliable carrier", true);
}

/// Actions of an attacker on the path of sealed datagrams.
#[derive(Clone, Debug, bolero::TypeGenerator)]
enum Action {
    /// One end seals a datagram. The fields: whether this end is the node, the datagram's length in bytes, and whether
    /// the datagram arrives now or is only kept for a replay.
    Says(bool, u16, bool),
    /// An earlier datagram arrives again. The fields: whether the node has sent it, its index, the changes to it, and
    /// whether it comes from another address.
    Again(bool, u16, Vec<Change>, bool),
    /// An earlier datagram is returned to its sender. The fields: whether the node has sent it, its index, and the
    /// changes.
    Back(bool, u16, Vec<Change>),
    /// Arbitrary bytes arrive at the node, if the flag is true, or at the client.
    Bytes(bool, Vec<u8>),
    /// The client repeats, in a greeting, a PING that got no response.
    Asks,
    /// Milliseconds pass. The flag says whether a session uses the connection meanwhile.
    Wait(u16, bool),
    /// The node restarts.
    Anew,
}

/// A client, a node, and all datagrams that they have sealed. Each datagram that one end accepts must be one that the
/// other has sealed, and is accepted once.
struct Sealed {
    client: seal::client::Client,
    node: seal::node::Node,
    now: Duration,
    connection: Option<u32>,
    sealed: [Vec<Vec<u8>>; 2],
    said: [Vec<Vec<u8>>; 2],
    heard: [Vec<Vec<u8>>; 2],
    number: u64,
}

const HOSTS: [SocketAddr; 2] = [
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), 1),
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)), 2),
];

fn draws(seed: u8) -> impl FnMut() -> [u8; 32] + Send + 'static {
    let mut number = 0_u64;
    move || {
        number += 1;
        let mut bytes = [seed; 32];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        bytes
    }
}

impl Sealed {
    fn node(seed: u8) -> seal::node::Node {
        let find = |name| Some(seal::Shared::new([7; 32])).filter(|shared| shared.name() == name);
        seal::node::Node::new(Box::new(find), Box::new(draws(seed)))
    }

    fn new() -> Sealed {
        let client = seal::client::Client::new(seal::Shared::new([7; 32]), draws(0));
        Sealed {
            client,
            node: Sealed::node(1),
            now: Duration::ZERO,
            connection: None,
            sealed: Default::default(),
            said: Default::default(),
            heard: Default::default(),
            number: 0,
        }
    }

    /// Returns a datagram of a session that differs from all others and fits in a greeting.
    fn datagram(&mut self, len: u16) -> Vec<u8> {
        self.number += 1;
        let mut bytes = vec![0; 24];
        bytes[..4].copy_from_slice(b"Fs\x02\x05");
        bytes.extend_from_slice(&self.number.to_le_bytes());
        bytes.resize(32 + usize::from(len) % 1000, 9);
        bytes
    }

    fn says(&mut self, from_node: bool, len: u16) -> Option<Vec<u8>> {
        let (datagram, mut out) = (self.datagram(len), Vec::new());
        if from_node {
            let connection = self.connection?;
            let overhead = self.node.overhead(connection)?;
            self.node.seal(connection, &datagram, &mut out);
            assert_eq!(out.len(), datagram.len() + overhead);
        } else {
            let len = self.client.sealed_len(&datagram);
            self.client.seal(&datagram, &mut out);
            assert_eq!(out.len(), len);
        }
        self.said[usize::from(from_node)].push(datagram);
        self.sealed[usize::from(from_node)].push(out.clone());
        Some(out)
    }

    fn arrives(&mut self, at_node: bool, mut bytes: Vec<u8>, host: usize) {
        let len = bytes.len();
        let came = if at_node {
            match self.node.open(HOSTS[host], &mut bytes) {
                Arrived::Datagram(connection, datagram) => {
                    let datagram = datagram.to_vec();
                    self.connection = Some(connection).filter(|_| host == 0).or(self.connection);
                    Some(datagram)
                }
                Arrived::Outsider(..) => {
                    assert!(len >= 1200, "no response is longer than the greeting");
                    None
                }
                Arrived::Nothing => None,
            }
        } else {
            self.client.open(&mut bytes).map(<[u8]>::to_vec)
        };
        // A refusal of any version reaches the client unsealed; the session checks its nonce.
        let is_refusal = |datagram: &[u8]| !at_node && datagram.starts_with(b"Fs") && datagram[3] == 3;
        if let Some(datagram) = came.filter(|datagram| !is_refusal(datagram)) {
            let from = usize::from(!at_node);
            assert!(self.said[from].contains(&datagram), "a forged datagram was accepted: {datagram:?}");
            assert!(!self.heard[from].contains(&datagram), "a datagram was accepted twice: {datagram:?}");
            self.heard[from].push(datagram);
        }
        assert!(self.node.connections() <= 64, "each connection stems from a greeting of the client");
    }

    fn act(&mut self, action: &Action) {
        match action {
            Action::Says(from_node, len, arrives) => {
                if let Some(bytes) = self.says(*from_node, *len).filter(|_| *arrives) {
                    self.arrives(!from_node, bytes, 0);
                }
            }
            Action::Again(from_node, which, changes, elsewhere) => {
                if let Some(mut bytes) = self.one(*from_node, *which) {
                    change(&mut bytes, changes);
                    self.arrives(!from_node, bytes, usize::from(*elsewhere));
                }
            }
            Action::Back(from_node, which, changes) => {
                if let Some(mut bytes) = self.one(*from_node, *which) {
                    change(&mut bytes, changes);
                    self.arrives(*from_node, bytes, 0);
                }
            }
            Action::Bytes(at_node, bytes) => self.arrives(*at_node, bytes.clone(), 0),
            Action::Asks => {
                let question = self.datagram(0);
                if self.client.needs_greeting(&question) && self.number < 50 {
                    let mut out = Vec::new();
                    self.client.seal_in_greeting(&question, &mut out);
                    self.said[0].push(question);
                    self.sealed[0].push(out.clone());
                    self.arrives(true, out, 0);
                }
            }
            Action::Wait(ms, is_used) => {
                self.now += Duration::from_millis((*ms).into());
                let connections = self.node.connections();
                self.node.forget_strangers(self.now, self.connection.filter(|_| *is_used).into_iter());
                if self.node.connections() < connections {
                    self.forget_greetings();
                }
            }
            Action::Anew => {
                self.node = Sealed::node(self.number as u8);
                self.forget_greetings();
            }
        }
    }

    /// Removes greetings from the datagrams to replay, since a node that has forgotten a greeting accepts it again.
    /// Only the original client can read its response.
    fn forget_greetings(&mut self) {
        self.sealed[0].retain(|bytes| bytes[3] != 1);
    }

    fn one(&self, from_node: bool, which: u16) -> Option<Vec<u8>> {
        let sealed = &self.sealed[usize::from(from_node)];
        (!sealed.is_empty()).then(|| sealed[usize::from(which) % sealed.len()].clone())
    }
}

#[test]
fn fuzz_sealed_datagrams() {
    let executions = Executions::of("sealed datagrams");
    let inputs = bolero::check!().with_test_time(budget()).with_max_len(16 << 10).with_type().cloned();
    inputs.for_each(|actions: Vec<Action>| {
        executions.one_more();
        let mut sealed = Sealed::new();
        actions.iter().take(60).for_each(|action| sealed.act(action));
        // After any history, a new client is served.
        sealed.client = seal::client::Client::new(seal::Shared::new([7; 32]), draws(99));
        for from_node in [false, true, false, true] {
            let bytes = sealed.says(from_node, 40).expect("a connection exists");
            let heard = sealed.heard[usize::from(from_node)].len();
            sealed.arrives(!from_node, bytes, 0);
            assert_eq!(
                sealed.heard[usize::from(from_node)].len(),
                heard + 1,
                "a valid client's datagram is accepted"
            );
        }
    });
}

#[test]
fn fuzz_frames_of_the_unix_socket() {
    let executions = Executions::of("frames of the unix socket");
    let seeds = [
        serde_json::to_vec(&frame::Hello { magic: frame::MAGIC.into(), version: frame::VERSION })
            .expect("plain data"),
        serde_json::to_vec(&frame::Greeting::Welcome { slot: 1, number: 2, incarnation: 3 })
            .expect("plain data"),
        serde_json::to_vec(&frame::Greeting::Refusal("no".into())).expect("plain data"),
        vec![7; 40],
    ];
    bolero::check!().with_test_time(budget()).with_type().cloned().for_each(
        |(seed, changes): (u8, Vec<Change>)| {
            executions.one_more();
            let mut bytes = seeds[usize::from(seed) % seeds.len()].clone();
            change(&mut bytes, &changes);
            if let Ok(hello) = serde_json::from_slice::<frame::Hello>(&bytes) {
                assert!(hello.magic.len() <= bytes.len());
            }
            if let Ok(greeting) = serde_json::from_slice::<frame::Greeting>(&bytes) {
                let again = serde_json::to_vec(&greeting).expect("plain data");
                assert!(serde_json::from_slice::<frame::Greeting>(&again).is_ok());
            }
            if let Some((_, body)) = frame::parse(&bytes) {
                assert_eq!(body.len() + 16, bytes.len());
            }
        },
    );
}
