//! An engine: a task that serves the sessions of one port and runs their chains one at a time, access by access.
//!
//! Invariant: a session is registered with the node from before its first chain until after its last.
//!
//! Invariant: messages that arrive while a chain runs wait for its end, as in the real engine, which is one thread.

use super::{Letter, Options, QueuePair, Serving};
use crate::memory::Replay;
use crate::network::{Arrival, Inbox, Network};
use crate::world::{MICROS, Nanos};
use farside_fabrics::session::answer;
use farside_fabrics::session::carrier::{self, Outsider};
use farside_fabrics::session::packet::{self, Kind};
use farside_fabrics::session::server::{Config, End, Hello, Host, Outcome, Request, RequestRef, Server};
use farside_node::engine::{Guarded, Keys};
use farside_node::served::{Begun, Calling, Served};
use farside_node::turn::{self, Serves};
use farside_remote::arena::session::{SessionId, epoch_at, turn_at};
use farside_remote::arena::{Arena, header};
use farside_remote::clock::Clock;
use farside_remote::control::Answer;
use farside_remote::fabric::ServiceId;
use farside_remote::service::{Work as ServiceWork, addressed};
use farside_remote::{Addr, By, Reply, Rights, Status, Width};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Responses that the node's task has for an engine.
#[derive(Default)]
pub(crate) struct Mail {
    answers: RefCell<Vec<(RequestRef, Result<Answer, String>)>>,
    /// Numbers of sessions whose clients were fenced.
    fenced: RefCell<Vec<u32>>,
    is_new: Cell<bool>,
    bell: RefCell<Option<Rc<Inbox>>>,
}

impl Mail {
    pub(super) fn answer(&self, request: RequestRef, answer: Result<Answer, String>) {
        self.answers.borrow_mut().push((request, answer));
        self.ring();
    }

    pub(super) fn end_fenced(&self, number: u32) {
        self.fenced.borrow_mut().push(number);
        self.ring();
    }

    /// Makes the engine look which of its calls' records are stored.
    pub(super) fn note_stored(&self) {
        self.ring();
    }

    fn ring(&self) {
        self.is_new.set(true);
        if let Some(inbox) = &*self.bell.borrow() {
            inbox.bell().ring();
        }
    }
}

/// Engine that serves the sessions of one port.
pub(super) struct Engine {
    serving: Rc<Serving>,
    network: Network,
    inbox: Rc<Inbox>,
    mail: Rc<Mail>,
    server: Server<crate::network::Address, SessionHost>,
    host: SessionHost,
    is_reliable: bool,
    memory: Replay,
    wide: Replay,
    reply: Reply,
    out: Vec<u8>,
    expires_at: Nanos,
    expiry: Nanos,
}

/// Server side of the engine's sessions. It queues the requests of a datagram, and executes them after it has decoded
/// the whole datagram.
struct SessionHost {
    serving: Rc<Serving>,
    index: usize,
    at_once_one_in: u64,
    /// Memory for chains that run at one instant, and the same memory for chains of wide stores.
    memory: Replay,
    wide: Replay,
    /// The engine's own session, whose list takes retired buffers. The engine opens the session before any message
    /// arrives.
    session: Option<SessionId>,
    /// The turn of the engine's own session.
    turn: u64,
    /// Queued requests, in the order in which they arrived.
    work: VecDeque<Work>,
    /// Calls whose records are not stored yet.
    begun: Vec<(RequestRef, Arc<Served<Replay>>, Begun)>,
    /// Letters to the node. The engine posts them after all queued requests are done.
    letters: Vec<Letter>,
    reply: Reply,
}

enum Work {
    Chain {
        at: RequestRef,
        number: u32,
        keys: Rc<RefCell<Keys>>,
        bytes: Vec<u8>,
    },
    Call {
        at: RequestRef,
        number: u32,
        keys: Rc<RefCell<Keys>>,
        service: ServiceId,
        request: Vec<u8>,
    },
    Retire {
        at: RequestRef,
        number: u32,
        buffers: Vec<(u32, Addr)>,
    },
    /// The second part of a call, with the outcome of its records.
    Finish {
        at: RequestRef,
        served: Arc<Served<Replay>>,
        begun: Begun,
        stored: Result<(), String>,
    },
}

/// State that the engine keeps for a client's session.
struct Client {
    number: u32,
    keys: Rc<RefCell<Keys>>,
    /// The session's queue pair, if the node has a NIC.
    pair: Option<Rc<QueuePair>>,
}

impl Engine {
    pub(super) fn new(
        serving: &Rc<Serving>,
        network: &Network,
        inbox: Rc<Inbox>,
        index: usize,
        options: &Options,
    ) -> Engine {
        let random = serving.world.random();
        let config = Config {
            node: random.bits(),
            datagram: options.datagram,
            is_reliable: options.is_reliable,
            silence: Duration::from_nanos(options.silence),
            ..Config::default()
        };
        let memory = || Replay::new(&serving.world, serving.bytes(), options.pace).seen_by(serving.seen());
        let mail = Rc::clone(&serving.mails[index]);
        *mail.bell.borrow_mut() = Some(Rc::clone(&inbox));
        let expiry = options.silence / 8;
        Engine {
            serving: Rc::clone(serving),
            network: network.clone(),
            inbox,
            mail,
            server: Server::new(config),
            host: SessionHost {
                serving: Rc::clone(serving),
                index,
                at_once_one_in: options.at_once_one_in,
                memory: memory(),
                wide: memory().wide(),
                session: None,
                turn: 0,
                work: VecDeque::new(),
                begun: Vec::new(),
                letters: Vec::new(),
                reply: Reply::new(),
            },
            is_reliable: options.is_reliable,
            memory: memory(),
            wide: memory().wide(),
            reply: Reply::new(),
            out: Vec::new(),
            expires_at: serving.world.now() + expiry,
            expiry,
        }
    }

    pub(super) async fn run(mut self) {
        let session = {
            let _passage = self.serving.step.enter().await;
            let mut machine = self.serving.machine.borrow_mut();
            let pid = self.serving.process.0 + 1;
            self.serving.memory.run_at_once(|memory| machine.open_engine(memory, pid, 1))
        };
        let session = session.expect("a node reserves sessions for its engines");
        self.host.session = Some(session);
        loop {
            let inbox = Rc::clone(&self.inbox);
            let rung = inbox.bell().rung();
            if !self.turn(session).await {
                let wait = self.expires_at.saturating_sub(self.serving.world.now());
                let _rung_or_not = crate::world::within(&self.serving.world, wait, rung).await;
            }
        }
    }

    fn now(&self) -> Duration {
        self.serving.clock.now()
    }

    /// Handles all messages that have arrived: runs requests and sends responses. Returns false if there was nothing to
    /// do.
    async fn turn(&mut self, session: SessionId) -> bool {
        let mut is_busy = false;
        while let Some(arrival) = self.inbox.take() {
            is_busy = true;
            let serving = Rc::clone(&self.serving);
            let (from, arrival) = match &arrival {
                Arrival::Message(from, bytes) => (*from, carrier::Arrival::Datagram(bytes)),
                Arrival::HungUp(from) => (*from, carrier::Arrival::HungUp),
            };
            {
                // Opening a session takes the node's lock.
                let _passage = match arrival {
                    carrier::Arrival::Datagram(bytes) if packet::is(bytes, Kind::Hello) => {
                        Some(serving.step.enter().await)
                    }
                    _ => None,
                };
                let now = || serving.clock.now();
                turn::arrive((&mut self.server, &mut self.host), (from, None), arrival, now);
            }
            self.work(session).await;
        }
        is_busy |= self.read_mail();
        if !self.host.letters.is_empty() || !self.host.work.is_empty() {
            self.work(session).await; // Sends the letters about ended sessions.
        }
        if self.serving.world.now() >= self.expires_at {
            self.expires_at = self.serving.world.now() + self.expiry;
            let now = self.now();
            self.server.expire(now, &mut self.host);
            self.work(session).await;
        }
        while let Some(to) = self.server.transmit(&mut self.out) {
            let from = self.inbox.address();
            if self.is_reliable {
                let _hung_up_is_told = self.network.send_on(from, to, self.out.clone());
            } else {
                self.network.send(from, to, self.out.clone());
            }
        }
        is_busy
    }

    /// Executes the queued requests within one turn of the engine's own session.
    async fn work(&mut self, session: SessionId) {
        if !self.host.work.is_empty() {
            self.host.publish_next_turn(session);
            while let Some(work) = self.host.work.pop_front() {
                self.carry_out(work, session).await;
            }
            self.host.publish_next_turn(session);
        }
        for letter in self.host.letters.drain(..) {
            self.serving.post(letter);
        }
    }

    async fn carry_out(&mut self, work: Work, session: SessionId) {
        match work {
            Work::Chain { at, number, keys, bytes } => {
                let mut answer = Vec::new();
                match turn::chain(&bytes) {
                    Ok(chain) => {
                        let is_wide = keys.borrow().is_wide(chain.key());
                        let memory = if is_wide { &self.wide } else { &self.memory };
                        let (reply, keys) = (&mut self.reply, &keys);
                        memory
                            .run(|memory| {
                                let seen = Guarded { memory, keys: &keys.borrow() };
                                farside_remote::run(
                                    &seen,
                                    By { owner: number, retires: session },
                                    chain,
                                    reply,
                                )
                            })
                            .await;
                        answer.extend_from_slice(self.reply.as_bytes());
                        if self.reply.last_status() == Status::NotReady {
                            self.serving.ring();
                        }
                    }
                    Err(reason) => answer::refuse(&mut answer, &reason),
                }
                let _heard_or_not = self.server.answer(at, &answer);
            }
            Work::Call { at, number, keys, service, request } => {
                let mut answer = Vec::new();
                match self.call(number, &keys, service, &request).await {
                    Ok(Ok(body)) => answer::put_body(&mut answer, &body),
                    Ok(Err((served, begun))) => {
                        self.host.begun.push((at, served, begun));
                        self.mail.note_stored(); // The records may be stored already.
                        return;
                    }
                    Err(refusal) => answer::refuse(&mut answer, &refusal),
                }
                let _heard_or_not = self.server.answer(at, &answer);
            }
            Work::Finish { at, served, begun, stored } => {
                let mut answer = Vec::new();
                match self.finish(&served, &begun, &stored).await {
                    Ok(body) => answer::put_body(&mut answer, &body),
                    Err(refusal) => answer::refuse(&mut answer, &refusal),
                }
                let _heard_or_not = self.server.answer(at, &answer);
            }
            Work::Retire { at, number, buffers } => {
                for (region, buffer) in buffers {
                    let retire =
                        |memory: &Replay| Arena::of(memory).retire_own(session, number, region, buffer.raw());
                    self.memory.run(retire).await;
                }
                let _heard_or_not = self.server.answer(at, &[]);
            }
        }
    }

    /// Calls the service of a store. Waits while other work of the service holds one of the call's locks.
    async fn call(
        &self,
        number: u32,
        keys: &RefCell<Keys>,
        service: ServiceId,
        request: &[u8],
    ) -> Result<Result<Vec<u8>, (Arc<Served<Replay>>, Begun)>, String> {
        let (own, request) = addressed(service, request)?;
        let opened = keys.borrow().stands_for(own);
        let (key, rights) = opened.ok_or("call refused: its key opens no store")?;
        let served = self.serving.served(key)?;
        loop {
            let passage = self.serving.step.enter().await;
            if let Some(attended) = served.try_lock(ServiceWork::Call(request)) {
                drop(passage);
                let calling = Calling { key, rights, session: Some(number), request };
                let start = || self.serving.start();
                let called = super::run_call(&self.memory, attended, start, calling).await?;
                if called.is_err() {
                    self.serving.log_bell.ring();
                }
                return Ok(called.map_err(|begun| (Arc::clone(&served), begun)));
            }
            drop(passage);
            self.serving.world.sleep(self.serving.world.random().heavy(MICROS)).await;
        }
    }

    /// Runs the second part of a call. Waits while other work of the service holds one of its locks.
    async fn finish(
        &self,
        served: &Served<Replay>,
        begun: &Begun,
        stored: &Result<(), String>,
    ) -> Result<Vec<u8>, String> {
        loop {
            let passage = self.serving.step.enter().await;
            let attended = served.try_lock(ServiceWork::Finish(&begun.state));
            drop(passage);
            if let Some(attended) = attended {
                let ended = (&begun.state[..], stored);
                let answered = super::end_call(&self.memory, &attended, self.serving.start(), ended).await;
                attended.forget(begun);
                return answered;
            }
            self.serving.world.sleep(self.serving.world.random().heavy(MICROS)).await;
        }
    }

    fn read_mail(&mut self) -> bool {
        if !self.mail.is_new.replace(false) {
            return false;
        }
        let begun = std::mem::take(&mut self.host.begun);
        for (at, served, begun) in begun {
            match served.outcome(&begun) {
                Some(stored) => self.host.work.push_back(Work::Finish { at, served, begun, stored }),
                None => self.host.begun.push((at, served, begun)),
            }
        }
        let answers = std::mem::take(&mut *self.mail.answers.borrow_mut());
        let fenced = std::mem::take(&mut *self.mail.fenced.borrow_mut());
        turn::deliver((&mut self.server, &mut self.host), answers, &fenced);
        true
    }
}

impl Serves for SessionHost {
    fn number(client: &Client) -> u32 {
        client.number
    }

    fn respond(&mut self, client: &mut Client, answered: Result<Answer, String>) -> Result<Vec<u8>, String> {
        let (answer, secret) = (answered?, self.serving.world.random().bits());
        let answer = match answer {
            Answer::Store(store) => {
                Answer::Store(client.keys.borrow_mut().show(store, Rights::ALL, || secret))
            }
            answer => answer,
        };
        Ok(serde_json::to_vec(&answer).expect("plain data"))
    }

    fn turn_away(&mut self, _: Outsider) -> String {
        unreachable!("the simulated network rejects no greeting")
    }
}

impl Host for SessionHost {
    type Session = Client;

    fn secret(&mut self) -> u64 {
        self.serving.world.random().bits()
    }

    fn open(&mut self, hello: &Hello<'_>) -> Result<Client, String> {
        let mut machine = self.serving.machine.borrow_mut();
        let number = self.serving.memory.run_at_once(|memory| machine.open_remote(memory));
        let (keys, client) = (Rc::default(), (hello.identity, hello.incarnation));
        let pair = self.serving.nic.is_some().then(|| self.serving.open_pair(client, &keys));
        Ok(Client { number, keys, pair })
    }

    fn run(
        &mut self,
        client: &mut Client,
        at: RequestRef,
        request: Request<'_>,
        reply: &mut Vec<u8>,
    ) -> Outcome {
        match request {
            Request::Chain(bytes) => {
                let is_at_once = self.serving.world.random().one_in(self.at_once_one_in);
                // A chain that runs at once must not overtake queued requests.
                if is_at_once && self.work.is_empty() {
                    self.run_at_once(client, bytes, reply);
                    return Outcome::Done;
                }
                let (number, keys) = (client.number, Rc::clone(&client.keys));
                self.work.push_back(Work::Chain { at, number, keys, bytes: bytes.to_vec() });
                Outcome::Later
            }
            Request::Retire(buffers) => {
                let (number, keys) = (client.number, client.keys.borrow());
                let buffers = buffers.filter(|&(region, _)| keys.may_allocate(region)).collect();
                self.work.push_back(Work::Retire { at, number, buffers });
                Outcome::Later
            }
            Request::Call(service, request) if service != ServiceId::NODE => {
                let (number, keys) = (client.number, Rc::clone(&client.keys));
                let request = request.to_vec();
                self.work.push_back(Work::Call { at, number, keys, service, request });
                Outcome::Later
            }
            Request::Call(_, request) => match turn::parse(request) {
                Ok(ask) => {
                    self.letters.push(Letter::RemoteRequest(self.index, client.number, at, ask));
                    Outcome::Later
                }
                Err(refusal) => {
                    answer::refuse(reply, &refusal);
                    Outcome::Done
                }
            },
        }
    }

    fn close(&mut self, client: Client, end: End) {
        if let Some(pair) = &client.pair {
            self.serving.close_pair(pair);
        }
        self.letters.push(Letter::Ended(client.number, end == End::Said));
    }
}

impl SessionHost {
    /// Begins or ends a turn of the engine's own session.
    fn publish_next_turn(&mut self, session: SessionId) {
        self.turn += 1;
        let bytes = self.serving.bytes();
        let epoch = bytes.load(header::EPOCH_AT, Width::W8) as u64;
        bytes.poke(epoch_at(session.slot), &epoch.to_le_bytes());
        bytes.poke(turn_at(session.slot), &self.turn.to_le_bytes());
    }

    /// Runs a chain without interruption. The chain needs no turn to be safe, since it ends at the instant at which it
    /// starts. But if it leaves retired buffers to the engine's own session, the node has to see that the session was
    /// not idle: it takes once only what an idle session has kept.
    fn run_at_once(&mut self, client: &Client, bytes: &[u8], reply: &mut Vec<u8>) {
        match turn::chain(bytes) {
            Ok(chain) => {
                let (number, own) = (client.number, &mut self.reply);
                let keys = client.keys.borrow();
                let memory = if keys.is_wide(chain.key()) { &self.wide } else { &self.memory };
                let retires = self.session.expect("an engine opens its session before any message arrives");
                memory.run_at_once(|memory| {
                    let seen = Guarded { memory, keys: &keys };
                    farside_remote::run(&seen, By { owner: number, retires }, chain, own)
                });
                reply.extend_from_slice(own.as_bytes());
                if own.retired() > own.retired_for_node() {
                    self.publish_next_turn(retires);
                    self.publish_next_turn(retires);
                }
            }
            Err(reason) => answer::refuse(reply, &reason),
        }
    }
}
