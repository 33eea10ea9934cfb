//! Engines: threads that run the chains of remote sessions, each at its own port.
//!
//! An engine receives requests, runs them, and sends the responses in a batch. While nothing arrives it polls for a
//! short time, then sleeps; in [`EngineMode::Event`] it sleeps at once. Its chains run in turns of its own slot, and
//! its sessions' retired buffers go onto that slot's list. The engine locks the node's state only to open a session. It
//! sends all other requests to the node's thread as a [`Letter`], and the responses return through the engine's
//! [`Mail`].
//!
//! Invariant: a session is open at the node from before its first chain runs until after its last one.
//! Invariant: a session's request is judged by its token before it reaches the node. Once an engine has read that a
//! token or right was revoked, none of its later turns uses that token or right.

use super::{EngineMode, Randomness, Shared, entropy};
use crate::access::{Access, LOCKED_FOR, LogLimit, SessionLimit, Source, Token};
use crate::engine::{Guarded, Keys};
use crate::served::{Begun, Buffers, Calling, Served, Start, no_store};
use crate::turn::{self, Serves};
use farside_fabrics::memory::Mapping;
use farside_fabrics::runner::Runner;
use farside_fabrics::session::answer;
use farside_fabrics::session::carrier::{Outsider, Port};
use farside_fabrics::session::server::{Config, End, Hello, Host, Outcome, Request, RequestRef, Server};
use farside_fabrics::session::{BODY_BYTES_MAX, Counters};
use farside_fabrics::shm::frame;
use farside_fabrics::spin::spin;
use farside_fabrics::timer::{self, timespec};
use farside_remote::arena::session::SessionId;
use farside_remote::control::{Answer, Ask, Refusals};
use farside_remote::fabric::{CALL_BYTES_MAX, ServiceId};
use farside_remote::service::addressed;
use farside_remote::{ChainView, Key, Reply, Status};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time without a message from a session after which the session ends.
const SILENCE: Duration = Duration::from_secs(5);
/// Interval of checks for silent sessions.
const EXPIRY: Duration = Duration::from_millis(500);
/// Maximum number of outstanding calls of one session.
const ASKED_MAX: u32 = 64;
/// Maximum size of one session's requests in flight, in bytes.
const CREDIT: usize = 128 * 1024;
/// Maximum number of sessions of one engine.
const SESSIONS_MAX: usize = 16 * 1024;
/// Maximum number of sessions of one engine from one source, so that one source cannot use up [`SESSIONS_MAX`].
const SESSIONS_PER_SOURCE: u32 = 12 * 1024;
/// Number of chains with keys that were never issued to a session, after which the session ends.
const WRONG_KEYS_MAX: u32 = 16;

/// The mailbox through which the node's thread sends responses and notices to an engine's thread.
pub(super) struct Mail {
    answers: Mutex<Vec<(RequestRef, Result<Answer, String>)>>,
    /// Numbers of sessions whose clients were fenced.
    fenced: Mutex<Vec<u32>>,
    /// Whether there are responses or numbers of fenced sessions.
    has_answers: AtomicBool,
    /// Whether the set of tokens has changed since the engine last read it.
    has_access: AtomicBool,
    /// Whether the engine has calls whose records are not stored yet, and whether some may be stored since it last
    /// looked.
    waits_for_log: AtomicBool,
    has_stored: AtomicBool,
    asleep: AtomicBool,
    stop: AtomicBool,
    bell: OwnedFd,
    counted: Mutex<Counted>,
}

/// The counters of one engine.
#[derive(Clone, Copy, Default)]
pub(super) struct Counted {
    /// Number of open sessions.
    pub(super) sessions: u64,
    /// Traffic of all the engine's sessions, including closed ones.
    pub(super) session: Counters,
    /// Numbers of refused requests.
    pub(super) refusals: Refusals,
}

impl Mail {
    pub(super) fn new() -> rustix::io::Result<Mail> {
        Ok(Mail {
            answers: Mutex::default(),
            fenced: Mutex::default(),
            has_answers: AtomicBool::new(false),
            has_access: AtomicBool::new(false),
            waits_for_log: AtomicBool::new(false),
            has_stored: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            counted: Mutex::default(),
        })
    }

    /// Delivers the response to a session's request.
    pub(super) fn answer(&self, request: RequestRef, answer: Result<Answer, String>) {
        self.answers().push((request, answer));
        self.has_answers.store(true, Ordering::SeqCst);
        self.ring();
    }

    /// Makes the engine end a session whose client was fenced.
    pub(super) fn end_fenced(&self, number: u32) {
        self.fenced().push(number);
        self.has_answers.store(true, Ordering::SeqCst);
        self.ring();
    }

    /// Makes the engine check its sessions again, since some tokens may be gone or have other rights.
    pub(super) fn renew_access(&self) {
        self.has_access.store(true, Ordering::SeqCst);
        self.ring();
    }

    /// Makes the engine look which of its calls' records are stored, if it waits for any.
    pub(super) fn note_stored(&self) {
        if self.waits_for_log.load(Ordering::SeqCst) {
            self.has_stored.store(true, Ordering::SeqCst);
            self.has_answers.store(true, Ordering::SeqCst);
            self.ring();
        }
    }

    /// The engine's counters, at most half a second old.
    pub(super) fn counted(&self) -> Counted {
        *self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answers(&self) -> MutexGuard<'_, Vec<(RequestRef, Result<Answer, String>)>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fenced(&self) -> MutexGuard<'_, Vec<u32>> {
        self.fenced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        // SeqCst: pairs with the store in `EngineLoop::sleep`, so either the engine sees the new mail before it sleeps,
        // or this thread sees that the engine is asleep.
        if self.asleep.load(Ordering::SeqCst) {
            frame::ring(&self.bell);
        }
    }
}

/// What gives an engine's clients access to the memory by the NIC.
#[cfg(feature = "verbs")]
pub(super) type Nic = Arc<farside_fabrics::verbs::Grants>;
/// Built without RDMA, so no engine has a NIC.
#[cfg(not(feature = "verbs"))]
pub(super) type Nic = std::convert::Infallible;

/// A message from an engine to the node's thread. The engine does not wait until the message is read.
pub(super) enum Letter {
    /// A session sends a request to the node.
    Asked { engine: usize, number: u32, at: RequestRef, ask: Ask },
    /// A session has ended and runs no more chains.
    Ended { number: u32, is_clean: bool },
}

/// A running engine, which stops when it is dropped.
pub(super) struct Engine {
    mail: Arc<Mail>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts the engine with mailbox `index` at `port`, which runs chains in turns of `session`.
    pub(super) fn start<P: Port + 'static>(
        shared: &Arc<Shared>,
        index: usize,
        session: SessionId,
        port: P,
        nic: Option<Nic>,
    ) -> std::io::Result<Engine> {
        let (shared, mail) = (Arc::clone(shared), Arc::clone(&shared.mails[index]));
        let theirs = Arc::clone(&mail);
        let thread =
            std::thread::Builder::new().name(format!("farside-engine-{index}")).spawn(move || {
                let runner = Runner::new(Arc::clone(&shared.memory), session);
                let handler = Handler {
                    shared,
                    index,
                    mail: theirs,
                    nic,
                    runner,
                    reply: Reply::new(),
                    answer: Vec::new(),
                    buffers: Buffers::default(),
                    pending: Vec::new(),
                    random: Randomness::new(),
                    served: BTreeMap::new(),
                    expected: VecDeque::new(),
                    source: None,
                    session_limit: SessionLimit::new(SESSIONS_PER_SOURCE),
                    refusals: Refusals::default(),
                    has_guessers: false,
                    keys_log: LogLimit::default(),
                    locks_log: LogLimit::default(),
                };
                EngineLoop::new(port, handler).run();
            })?;
        Ok(Engine { mail, thread: Some(thread) })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.mail.stop.store(true, Ordering::SeqCst);
        self.mail.ring();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// The loop of an engine's thread: the engine's port, its sessions, and their handler.
struct EngineLoop<P: Port> {
    port: P,
    server: Server<P::Address, Handler>,
    handler: Handler,
    /// Number of requests that had been executed when the engine last slept.
    executed: u64,
    out: Vec<u8>,
    expires_at: Duration,
}

impl<P: Port> EngineLoop<P> {
    fn new(port: P, handler: Handler) -> EngineLoop<P> {
        let config = Config {
            node: entropy()[0],
            datagram: port.datagram_max(),
            sessions_max: SESSIONS_MAX,
            inbound_bytes: SESSIONS_MAX * CREDIT,
            silence: SILENCE,
            is_reliable: P::IS_RELIABLE,
            ..Config::default()
        };
        let server = Server::new(config);
        EngineLoop {
            port,
            server,
            handler,
            executed: 0,
            out: Vec::new(),
            expires_at: timer::coarse_now() + EXPIRY,
        }
    }

    fn run(mut self) {
        while !self.handler.mail.stop.load(Ordering::Relaxed) {
            match self.turn() {
                Ok(true) => {}
                Ok(false) => self.idle(),
                Err(reason) => {
                    tracing::error!("an engine's port broke, and the engine stops: {reason}");
                    // The node waits for the ends of sessions.
                    self.server.end_where(&mut self.handler, End::Broken, |_| true);
                    break;
                }
            }
        }
        self.end_pending();
    }

    /// Waits until the records of all calls are stored, or cannot be, and ends these calls. No other thread would: they
    /// would keep what they have reserved, and a log accepts nothing while a call waits whose records failed.
    fn end_pending(&mut self) {
        while let Some(Pending { served, begun, .. }) = self.handler.pending.first() {
            served.wait_for(begun);
            self.end_calls();
            self.handler.end_turn();
        }
    }

    /// Receives requests, runs them and responds. Returns false if no request arrived.
    #[inline]
    fn turn(&mut self) -> Result<bool, String> {
        let EngineLoop { port, server, handler, .. } = self;
        // Read the clock only if something has arrived: polling the rings is cheaper than reading the clock.
        let mut time = None;
        let received = port.receive(|from, arrival| {
            let now = || *time.get_or_insert_with(timer::coarse_now);
            turn::arrive((&mut *server, &mut *handler), (from, P::source(from)), arrival, now);
        });
        let mut is_busy = received.map_err(|broken| broken.0)?;
        if std::mem::take(&mut handler.has_guessers) {
            server.end_where(handler, End::Revoked, |client| client.wrong_keys >= WRONG_KEYS_MAX);
        }
        is_busy |= self.read_mail();
        if is_busy {
            self.answer();
            self.keep_time(time);
        }
        Ok(is_busy)
    }

    /// Sends all responses, and ends the engine's turn.
    fn answer(&mut self) {
        while let Some(to) = self.server.transmit(&mut self.out) {
            self.port.send(to, &self.out);
        }
        self.port.flush();
        self.handler.end_turn();
    }

    /// Ends silent sessions, if the check is due. `time` is the current time, if known.
    fn keep_time(&mut self, time: Option<Duration>) {
        let now = time.unwrap_or_else(timer::coarse_now);
        if now < self.expires_at {
            return;
        }
        self.expires_at = now + EXPIRY;
        self.server.expire(now, &mut self.handler);
        self.show_counters();
        self.answer();
        // Close connections last: before, the clients of ended sessions must be notified of the end and of the requests
        // that ran.
        self.port.close_without_session(self.server.addresses());
    }

    fn read_mail(&mut self) -> bool {
        let mail = &self.handler.mail;
        let mut is_asked = false;
        if mail.has_access.load(Ordering::Relaxed) {
            mail.has_access.store(false, Ordering::SeqCst);
            let access = self.handler.shared.access();
            self.server.end_where(&mut self.handler, End::Revoked, |client| !client.renew(&access));
            #[cfg(feature = "verbs")]
            self.limit_nic();
            is_asked = true;
        }
        let mail = &self.handler.mail;
        // Load before the swap: a swap on every poll would take the cache line from the writer.
        if !mail.has_answers.load(Ordering::Relaxed) || !mail.has_answers.swap(false, Ordering::SeqCst) {
            return is_asked;
        }
        let answers = std::mem::take(&mut *mail.answers());
        let fenced = std::mem::take(&mut *mail.fenced());
        turn::deliver((&mut self.server, &mut self.handler), answers, &fenced);
        if self.handler.mail.has_stored.swap(false, Ordering::SeqCst) {
            self.end_calls();
        }
        true
    }

    /// Ends the NIC's access by rights that no session has any more.
    #[cfg(feature = "verbs")]
    fn limit_nic(&mut self) {
        let Some(nic) = self.handler.nic.clone() else { return };
        let mut held = Vec::new();
        self.server.end_where(&mut self.handler, End::Revoked, |client| {
            held.extend(client.keys.held().map(|(key, rights)| (client.token.name.clone(), key, rights)));
            false
        });
        nic.limit(&held);
    }

    /// Ends the calls whose records are stored, or could not be, and responds to them.
    fn end_calls(&mut self) {
        let Handler { pending, runner, random, buffers, answer, mail, .. } = &mut self.handler;
        runner.enter();
        let mut bytes = Vec::new();
        pending.retain(|Pending { at, served, begun }| {
            let Some(stored) = served.outcome(begun) else { return true };
            let start = Start { now: timer::coarse_now(), seed: random.next() };
            match served.finish(runner.memory(), start, (begun, &stored), buffers, answer) {
                Ok(()) => answer::put_body(&mut bytes, answer),
                Err(refusal) => answer::refuse(&mut bytes, &refusal),
            }
            // If the session has ended, nobody waits for the response.
            self.server.answer(*at, &bytes);
            bytes.clear();
            false
        });
        if pending.is_empty() {
            mail.waits_for_log.store(false, Ordering::SeqCst);
        }
    }

    /// Called when nothing has arrived: polls for a while if there were requests lately, unless engines are to wait for
    /// events, then sleeps.
    fn idle(&mut self) {
        self.keep_time(None);
        let executed = self.server.counters().executed;
        let was_asked = std::mem::replace(&mut self.executed, executed) != executed;
        // If the port is broken, the next call of [`EngineLoop::turn`] reports it.
        let polls = was_asked && self.handler.shared.engine_mode == EngineMode::Poll;
        if polls && spin(|| (self.turn() != Ok(false)).then_some(())).is_some() {
            return;
        }
        self.show_counters();
        self.sleep();
    }

    fn sleep(&mut self) {
        let mail = &self.handler.mail;
        mail.asleep.store(true, Ordering::SeqCst);
        let has_mail = mail.has_answers.load(Ordering::SeqCst)
            || mail.has_access.load(Ordering::SeqCst)
            || mail.stop.load(Ordering::SeqCst);
        if !has_mail && self.port.may_sleep() {
            let mut fds = [
                PollFd::from_borrowed_fd(self.port.fd(), PollFlags::IN),
                PollFd::new(&mail.bell, PollFlags::IN),
            ];
            let expiry = self.expires_at.saturating_sub(timer::coarse_now());
            // Without sessions or connections, no timer is needed.
            let expiry = (self.server.sessions() > 0 || self.port.connections() > 0).then_some(expiry);
            let wait = [expiry, self.port.sleep_max()].into_iter().flatten().min();
            let wait = wait.map(timespec);
            let _interrupted_or_not = poll(&mut fds, wait.as_ref());
            if !fds[1].revents().is_empty() {
                let _emptied = rustix::io::read(&mail.bell, &mut [0; 8]);
            }
        }
        mail.asleep.store(false, Ordering::SeqCst);
    }

    fn show_counters(&self) {
        let session = *self.server.counters();
        let dropped = self.port.dropped();
        let refusals = Refusals {
            bad_secrets: session.bad_secrets,
            forged: dropped.forged,
            replayed: dropped.replayed,
            chains: self.handler.runner.counters().refused,
            ..self.handler.refusals
        };
        let mut counted = self.handler.mail.counted.lock().unwrap_or_else(PoisonError::into_inner);
        *counted = Counted { sessions: self.server.sessions() as u64, session, refusals };
    }
}

const NO_TOKEN: &str = "it asks for a token, and none was shown: name a file that holds yours with --token-file or \
                        FARSIDE_TOKEN_FILE";
const WRONG_TOKEN: &str = "it does not know this token: ask its administrator for one, and name the file that holds it \
                           with --token-file or FARSIDE_TOKEN_FILE";
const UNSEALED: &str = "it accepts only sealed packets, and this greeting was not sealed: omit --insecure-udp; others \
                        may have seen the token, so have it replaced";
const SEALED: &str = "it accepts no sealed packets, since it serves without --tokens or with --insecure-udp: omit the \
                      token if it needs none; or give --insecure-udp too, if the network is trusted";

const ATOMICS_BY_NIC: &str = "this node's NIC executes the atomics of its stores (--nic-atomics), and its engines \
                              none: connect over verbs, and use a system that needs no conditional ops";

const TOO_MANY_KEYS: &str = "the session used too many invalid keys, and is closed";

/// A call that an engine ends once its records are stored.
struct Pending {
    at: RequestRef,
    served: Arc<Served<Mapping>>,
    begun: Begun,
}

/// The handler of an engine's sessions, which runs their chains and calls.
struct Handler {
    shared: Arc<Shared>,
    index: usize,
    mail: Arc<Mail>,
    /// Access of the clients to the memory by the NIC, if the engine's port is of RDMA.
    #[cfg_attr(not(feature = "verbs"), allow(dead_code, reason = "there is none"))]
    nic: Option<Nic>,
    runner: Runner,
    reply: Reply,
    /// Response of the store's service that was called last.
    answer: Vec<u8>,
    buffers: Buffers,
    /// Calls whose records are not stored yet.
    pending: Vec<Pending>,
    /// Source of the seeds of the calls' random draws.
    random: Randomness,
    /// The service that was last called in each region. The service's key shows whether the service is still current.
    served: BTreeMap<u32, Arc<Served<Mapping>>>,
    /// Numbers of prefetch hints of the chains that were received and not yet run, in order.
    expected: VecDeque<usize>,
    /// Source of the message being received.
    source: Option<Source>,
    session_limit: SessionLimit,
    refusals: Refusals,
    /// Whether a session has used too many wrong keys and must end.
    has_guessers: bool,
    keys_log: LogLimit,
    locks_log: LogLimit,
}

/// The state that an engine keeps for one session.
struct Client {
    /// Session number, which the session's buffers record as their owner.
    number: u32,
    source: Option<Source>,
    token: Arc<Token>,
    keys: Keys,
    /// Number of outstanding calls.
    asked: u32,
    wrong_keys: u32,
    /// Whether rights were revoked, so that the session may hold buffers that it cannot retire.
    was_limited: bool,
}

impl Client {
    /// Updates the session's keys to its token's current rights. Returns false if the token is no longer known.
    fn renew(&mut self, access: &Access) -> bool {
        let Some(token) = access.renew(&self.token) else { return false };
        self.was_limited |= self.keys.limit(|store| token.rights(store));
        self.token = token;
        true
    }

    /// Encodes a response for this session, with the session's own key to a store.
    fn read(&mut self, answer: Answer) -> Result<Vec<u8>, String> {
        let answer = match answer {
            Answer::Store(store) => {
                let rights = self.token.rights(&store.name);
                Answer::Store(self.keys.show(store, rights, || entropy()[0]))
            }
            answer => self.token.may_know(answer),
        };
        let body = serde_json::to_vec(&answer).expect("plain data");
        if body.len() > CALL_BYTES_MAX {
            return Err(format!(
                "the response has {} bytes, and a call carries at most {CALL_BYTES_MAX}: request less",
                body.len()
            ));
        }
        Ok(body)
    }
}

const _: () = assert!(CALL_BYTES_MAX < BODY_BYTES_MAX);

impl Host for Handler {
    type Session = Client;

    fn secret(&mut self) -> u64 {
        entropy()[0]
    }

    fn open(&mut self, hello: &Hello<'_>) -> Result<Client, String> {
        let token = self.admit(hello.token)?;
        let source = self.source;
        if source.is_some_and(|source| !self.session_limit.enter(source)) {
            return Err(format!(
                "{SESSIONS_PER_SOURCE} sessions are open from your address, the maximum of one engine: end one, or run \
                 the node with more --engines"
            ));
        }
        let Ok(number) = self.shared.state().node.open_remote(&self.shared.memory);
        let keys = Keys::default();
        Ok(Client { number, source, token, keys, asked: 0, wrong_keys: 0, was_limited: false })
    }

    fn expect(&mut self, _client: &mut Client, request: Request<'_>) {
        if let Request::Chain(bytes) = request {
            let hints = ChainView::decode(bytes).map_or(0, |(chain, _)| self.runner.expect(chain));
            self.expected.push_back(hints);
        }
    }

    fn ready(&mut self) {
        self.runner.fetch_ahead();
    }

    fn run(
        &mut self,
        client: &mut Client,
        at: RequestRef,
        request: Request<'_>,
        reply: &mut Vec<u8>,
    ) -> Outcome {
        match request {
            Request::Chain(bytes) => self.run_chain(client, bytes, reply),
            #[cfg(feature = "verbs")]
            Request::Call(ServiceId::NIC, request) => match self.ask_nic(client, request) {
                Ok(response) => answer::put_body(reply, &response),
                Err(refusal) => answer::refuse(reply, &refusal),
            },
            Request::Call(service, request) if service != ServiceId::NODE => {
                match self.call(client, at, service, request) {
                    Ok(Outcome::Later) => return Outcome::Later,
                    Ok(Outcome::Done) => answer::put_body(reply, &self.answer),
                    Err(refusal) => answer::refuse(reply, &refusal),
                }
            }
            Request::Call(_, request) => match self.ask(client, at, request) {
                Ok(()) => return Outcome::Later,
                Err(refusal) => answer::refuse(reply, &refusal),
            },
            Request::Retire(buffers) => {
                self.runner.enter();
                // A session without the right keeps its buffers until a scan finds them.
                for (region, buffer) in buffers.filter(|&(region, _)| client.keys.may_allocate(region)) {
                    self.runner.retire(client.number, region, buffer);
                }
                if self.runner.is_much_retired() {
                    self.ring_node();
                }
            }
        }
        Outcome::Done
    }

    fn close(&mut self, client: Client, end: End) {
        if let Some(source) = client.source {
            self.session_limit.leave(source);
        }
        // Before the letter: the node may give the session's buffers to others once it has read that.
        #[cfg(feature = "verbs")]
        self.nic.iter().for_each(|nic| nic.end(client.number));
        let is_clean = end == End::Said && !client.was_limited;
        self.shared.post(Letter::Ended { number: client.number, is_clean });
    }
}

impl Serves for Handler {
    fn number(client: &Client) -> u32 {
        client.number
    }

    fn respond(&mut self, client: &mut Client, answered: Result<Answer, String>) -> Result<Vec<u8>, String> {
        client.asked -= 1;
        client.read(answered?)
    }

    fn note_source(&mut self, source: Option<IpAddr>) {
        self.source = source.map(Source::from);
    }

    fn turn_away(&mut self, why: Outsider) -> String {
        match why {
            Outsider::WrongSeal | Outsider::Unsealed { shows_token: false } => {
                let access = self.shared.access();
                let looked = self.look_for_lock(&access);
                looked.map_or_else(|locked| locked, |()| self.count_guess(why != Outsider::WrongSeal).into())
            }
            Outsider::Unsealed { shows_token: true } => {
                self.refusals.bad_tokens += 1;
                UNSEALED.into()
            }
            Outsider::Sealed => SEALED.into(),
            Outsider::Version { theirs, ours } => format!(
                "the client seals packets with version {theirs}, this node with version {ours}; use a node and a \
                 client of one release"
            ),
        }
    }
}

impl Handler {
    fn end_turn(&mut self) {
        self.expected.clear(); // Remove the hints of chains that did not run.
        self.runner.end_turn();
    }

    /// Returns the token with this secret.
    fn admit(&mut self, secret: &[u8]) -> Result<Arc<Token>, String> {
        let access = self.shared.access();
        self.look_for_lock(&access)?;
        if let Some(token) = access.admit(secret) {
            return Ok(token);
        }
        Err(self.count_guess(secret.is_empty()).into())
    }

    /// Checks that the source is not locked out.
    ///
    /// # Errors
    /// The source is locked out; the error says for how long.
    fn look_for_lock(&mut self, access: &Access) -> Result<(), String> {
        if access.is_guarded()
            && let Some(source) = self.source
            && let Some(left) = self.shared.guesses().locked_for(source, self.shared.began.elapsed())
        {
            self.refusals.locked_out += 1;
            return Err(format!(
                "too many wrong tokens came from your address, and all are rejected now: try again in {} s",
                left.as_secs() + 1
            ));
        }
        Ok(())
    }

    /// Counts a greeting with an unknown token, or with none, and returns the reason for its refusal.
    fn count_guess(&mut self, is_none: bool) -> &'static str {
        self.refusals.bad_tokens += 1;
        if is_none {
            return NO_TOKEN;
        }
        self.note_guess(self.source);
        WRONG_TOKEN
    }

    /// Records a wrong guess from a source.
    fn note_guess(&mut self, source: Option<Source>) {
        let now = self.shared.began.elapsed();
        if let Some(source) = source
            && self.shared.guesses().guessed(source, now)
            && let Some(suffix) = self.locks_log.may(now)
        {
            tracing::warn!(
                "too many wrong tokens or keys came from {source}, and its greetings are rejected for {} s{suffix}",
                LOCKED_FOR.as_secs()
            );
        }
    }

    /// Handles a refused chain or buffer: its key may never have been issued to the session.
    #[cold]
    fn note_refused(&mut self, client: &mut Client, key: Key) {
        if client.keys.was_granted(key) {
            return;
        }
        self.refusals.wrong_keys += 1;
        client.wrong_keys += 1;
        if client.wrong_keys != WRONG_KEYS_MAX {
            return;
        }
        self.has_guessers = true;
        let now = self.shared.began.elapsed();
        if let Some(suffix) = self.keys_log.may(now) {
            tracing::warn!(
                "a session of the token '{}'{} has used {WRONG_KEYS_MAX} keys that it was never given, and is \
                 closed{suffix}",
                client.token.name,
                client.source.map_or_else(String::new, |source| format!(" from {source}"))
            );
        }
        if self.shared.access().is_guarded() {
            self.note_guess(client.source);
        }
    }

    fn run_chain(&mut self, client: &mut Client, bytes: &[u8], reply: &mut Vec<u8>) {
        // Take the hints first, so that later chains get their own hints even if this chain is refused.
        let hints = self.expected.pop_front().unwrap_or(0);
        if client.wrong_keys >= WRONG_KEYS_MAX {
            return answer::refuse(reply, TOO_MANY_KEYS);
        }
        let chain = match turn::chain(bytes) {
            Ok(chain) => chain,
            Err(reason) => return answer::refuse(reply, &reason),
        };
        if self.shared.nic_atomics && chain.atomics() > 0 {
            return answer::refuse(reply, ATOMICS_BY_NIC);
        }
        self.runner.proceed(hints);
        self.runner.enter();
        let (runner, keys) = (&self.runner, &client.keys);
        if keys.is_wide(chain.key()) {
            let seen = Guarded { memory: &self.shared.wide, keys };
            runner.run_on(&seen, client.number, chain, &mut self.reply);
        } else {
            let seen = Guarded { memory: runner.memory(), keys };
            runner.run_on(&seen, client.number, chain, &mut self.reply);
        }
        reply.extend_from_slice(self.reply.as_bytes());
        if self.runner.should_ring(&self.reply) {
            self.ring_node();
        }
        if matches!(self.reply.last_status(), Status::Access | Status::Invalid | Status::Aborted) {
            self.note_refused(client, chain.key());
        }
    }

    /// Handles a session's request for access to memory by the NIC.
    #[cfg(feature = "verbs")]
    fn ask_nic(&mut self, client: &mut Client, request: &[u8]) -> Result<Vec<u8>, String> {
        use farside_fabrics::verbs::request::{Request, Response};
        let nothing = || serde_json::to_vec(&Response::Registered(Vec::new())).expect("plain data");
        let Some(nic) = &self.nic else { return Err("no NIC executes chains for this session".to_owned()) };
        let request = serde_json::from_slice(request);
        let response = match request.map_err(|error| format!("the request is not understood: {error}"))? {
            Request::Connect(theirs) => {
                Response::Connected(nic.connect(client.number, &client.token.name, &theirs)?)
            }
            Request::Register { region, secret } => {
                let own = Key::new(region, secret);
                let Some((key, rights)) = client.keys.stands_for(own) else {
                    self.note_refused(client, own);
                    return Ok(nothing());
                };
                if client.keys.is_wide(own) {
                    return Ok(nothing()); // Engines take the locks of wide words.
                }
                let runs = super::runs_of(&self.shared.memory, key.region());
                let registered = nic.register(&client.token.name, &self.shared.memory, (key, rights), &runs);
                registered.inspect_err(|reason| {
                    tracing::warn!("a store's memory is not registered with the NIC: {reason}");
                })?
            }
        };
        Ok(serde_json::to_vec(&response).expect("plain data"))
    }

    /// Calls a store's service in the engine's thread, without a letter to the node's thread.
    fn call(
        &mut self,
        client: &mut Client,
        at: RequestRef,
        service: ServiceId,
        request: &[u8],
    ) -> Result<Outcome, String> {
        if client.wrong_keys >= WRONG_KEYS_MAX {
            return Err(TOO_MANY_KEYS.into());
        }
        let (own, request) = addressed(service, request)?;
        let Some((key, rights)) = client.keys.stands_for(own) else {
            self.note_refused(client, own);
            return Err(no_store(own));
        };
        self.runner.enter();
        let served = match self.served.get(&key.region()).filter(|served| served.key() == key) {
            Some(served) => served,
            None => {
                self.served.insert(key.region(), self.shared.served(key)?);
                &self.served[&key.region()]
            }
        };
        let random = &mut self.random;
        let start = || Start { now: timer::coarse_now(), seed: random.next() };
        let calling = Calling { key, rights, session: Some(client.number), request };
        let memory = self.runner.memory();
        let Some(begun) = served.serve(memory, start, calling, &mut self.buffers, &mut self.answer)? else {
            return Ok(Outcome::Done);
        };
        self.pending.push(Pending { at, served: Arc::clone(served), begun });
        // SeqCst: pairs with the load in `Mail::note_stored`, so either the log's thread sees that this engine waits,
        // or the engine sees below what that thread has settled.
        self.mail.waits_for_log.store(true, Ordering::SeqCst);
        let pending = self.pending.last().expect("it was added");
        if pending.served.outcome(&pending.begun).is_some() {
            self.mail.note_stored();
        }
        Ok(Outcome::Later)
    }

    fn ask(&mut self, client: &mut Client, at: RequestRef, request: &[u8]) -> Result<(), String> {
        let ask = turn::parse(request)?;
        if client.asked >= ASKED_MAX {
            return Err(format!("{ASKED_MAX} requests of this client are outstanding: wait for a response"));
        }
        client.token.judge(&ask).inspect_err(|_| self.refusals.asks += 1)?;
        if let Ask::OpenStore { name }
        | Ask::StoreStat { name }
        | Ask::GrowStore { name }
        | Ask::Bind { name, .. }
        | Ask::Wall { name, .. }
        | Ask::Fence { name, .. } = &ask
            && !client.token.admin
            && self.shared.state().node.catalog().get(name).is_err()
        {
            // The node's own message would list stores that this token may not know of.
            return Err(client.token.no_store(name));
        }
        client.asked += 1;
        self.shared.post(Letter::Asked { engine: self.index, number: client.number, at, ask });
        Ok(())
    }

    fn ring_node(&self) {
        if self.shared.memory.node_sleeps() {
            frame::ring(&self.shared.bell);
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
