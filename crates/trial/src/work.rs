//! Clients of a trial. Each client is a process that opens a session and the store, carries out operations, and
//! records the operations in the history. When a client's process dies, the client's next process replaces it.

use crate::family::{Failure, FailureKind, Family, Loss, OutcomeOf, Seat};
use crate::flight::{IDLE, Plan, Polled, Tracked};
use crate::pool::{Pool, Reach, SILENCE, STARTS_WITHIN, open_session};
use crate::{AGAIN, Carrier, Counted, Counts, Scene, Site, Trial, clock_of_next, mishaps, recoverers};
use farside_remote::FabricError;
use farside_remote::control::{self, Answer};
use farside_remote::fabric::Ran;
use farside_sim::clock::ProcessClock;
use farside_sim::fabric::session::Identity;
use farside_sim::fault::{Fault, FaultRates, Target};
use farside_sim::history::{Ask, Operation, OperationId, Outcome};
use farside_sim::node::Node;
use farside_sim::world::{MICROS, MILLIS, Nanos, ProcessId, SECONDS, within};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Distance between the keys of two successive contents of a node's store in the history. With it and `KEYS_PER_SITE`,
/// keys of different stores and of different nodes differ.
const KEYS_PER_STORE: u64 = 1 << 16;
const KEYS_PER_SITE: u64 = 1 << 40;

/// Usual time, in nanoseconds, after which an operation is dropped that a task of the client carries out.
const DROPPED_AFTER: Nanos = 10 * MICROS;

/// Time for reading a key after the faults have ended. A key may lie in a chain of 16 blocks, each one READ of many
/// lines. A slow NIC takes up to tens of milliseconds for such a READ, and a GET may read the chain twice.
const READ_WITHIN: Nanos = SECONDS;

/// Usual time, in nanoseconds, for which a client waits until a recoverer is about to make a rare request, in a trial
/// that focuses on recoverers.
const AWAITS_RECOVERERS: Nanos = 10 * MILLIS;
/// Longest such time. Without it, one wait in many thousands would outlast the trial.
const AWAITS_RECOVERERS_MAX: Nanos = 10 * SECONDS;

/// State that a client has at one node, and that outlives the client's processes.
#[derive(Default)]
struct SiteState {
    /// Number of sessions that the client has opened at the node.
    incarnation: Cell<u64>,
    /// Operations that have been called and have no outcome yet.
    unanswered: RefCell<Vec<OperationId>>,
    /// Keys, in the history, that operations of the last session may have written. The client reads them first: an
    /// operation that takes effect after that is seen in later reads.
    doubtful: RefCell<Vec<u64>>,
}

impl SiteState {
    /// Gives the pending operations an unknown outcome. Must be called only when nothing runs on the client's behalf
    /// any more, so that each pending operation has taken effect already or never will.
    fn settle<F: Family>(&self, trial: &Trial<F>) {
        for id in self.unanswered.take() {
            trial.returned(id, OutcomeOf::<F>::UNKNOWN);
        }
    }

    /// Settles the operations of a session that has ended, and notes the keys that they may have written.
    fn settle_session<F: Family>(&self, trial: &Trial<F>) {
        {
            let (history, unanswered) = (trial.history.borrow(), self.unanswered.borrow());
            let writes = unanswered.iter().map(|id| history.operation(*id)).filter(|of| !of.ask.is_read());
            self.doubtful.replace(writes.map(|of| of.key).collect());
        }
        self.settle(trial);
    }
}

/// The first key, in the history, of a store's contents.
pub(crate) fn first_key(site: &Site, contents: u32) -> u64 {
    site.index as u64 * KEYS_PER_SITE + u64::from(contents) * KEYS_PER_STORE
}

/// Judges what a site's store has kept after its node lost its memory, or its machine crashed, if it may lack its last
/// operations. In the history, the store's contents are new from now on: they begin with what was kept.
pub(crate) fn after_loss<F: Family>(trial: &Rc<Trial<F>>, site: &Rc<Site>) {
    let Trial { scene, family, history } = &**trial;
    if !family.may_lose_last() {
        return;
    }
    // A store that no client has opened may have vanished.
    let Some(store) = site.node.store(&site.store_name()) else {
        if site.is_opened.get() {
            scene.blame("a store has vanished although it had a log".to_owned());
        }
        return site.begin_contents();
    };
    let first = first_key(site, site.contents.get());
    let is_of_store = |key: u64| (first..first + KEYS_PER_STORE).contains(&key);
    let of_store = history.borrow().operations().iter().filter(|of| is_of_store(of.key)).cloned().collect();
    let before: Vec<Operation<F::Ask>> = of_store;
    let before: Vec<_> = before.into_iter().map(|of| Operation { key: of.key - first, ..of }).collect();
    let stalls = site.stalls.borrow().iter().copied().chain(site.node.disk_times()).collect();
    let loss = Loss { deaths: site.deaths.borrow().clone(), stalls };
    let kept = family.after_loss(&site.node, &store, &before, &loss);
    site.begin_contents();
    let (kept, has_lost) = match kept {
        Ok(kept) => kept,
        Err(violation) => return scene.blame(violation),
    };
    scene.count(|counts| counts.taken_back += u64::from(has_lost));
    let first = first_key(site, site.contents.get());
    for (key, ask, outcome) in kept {
        let id = history.borrow_mut().call(scene.drawn.clients, first + key, ask, scene.world.now());
        trial.returned(id, outcome);
    }
}

/// Starts a client in a new process.
pub(crate) fn start_client<F: Family>(trial: &Rc<Trial<F>>, client: u32) {
    start(trial, client, &trial.scene.sites.iter().map(|_| SiteState::default()).collect());
}

/// Starts the client's next process. Each time the client's process dies, starts another process.
fn start<F: Family>(trial: &Rc<Trial<F>>, client: u32, site_states: &Rc<[SiteState]>) {
    let scene = &trial.scene;
    if scene.is_over() {
        return;
    }
    let world = &scene.world;
    let process = if scene.drawn.resident == Some(client) {
        let Some(process) = scene.sites[0].node.process() else {
            let (theirs, site_states) = (Rc::clone(trial), Rc::clone(site_states));
            return world.at(world.now() + AGAIN, move || start(&theirs, client, &site_states));
        };
        process
    } else {
        world.start_process()
    };
    scene.clients.borrow_mut()[client as usize] = Some(process);
    let (theirs, next) = (Rc::clone(trial), Rc::clone(site_states));
    world.on_death(process, move || {
        let Trial { scene, family, .. } = &*theirs;
        if scene.drawn.carrier == Carrier::Direct && family.is_one_sided() {
            next.iter().for_each(|site_state| site_state.settle(&theirs)); // Chains ran on the dead client's own CPU.
        }
        scene.clients.borrow_mut()[client as usize] = None;
        // Half of the clients restart so soon that messages of their last process may be in flight.
        let random = scene.world.random();
        let usual = if random.one_in(2) { 20 * MICROS } else { MILLIS };
        let after = scene.world.now() + random.heavy(usual);
        let (theirs, next) = (Rc::clone(&theirs), Rc::clone(&next));
        scene.world.at(after, move || start(&theirs, client, &next));
    });
    let clock = clock_of_next(scene, client);
    scene.clocks.borrow_mut()[client as usize] = Some(clock.clone());
    let site_states = Rc::clone(site_states);
    let sites = if F::SPANS { &scene.sites[..1] } else { &scene.sites };
    let open = Cell::new(sites.len());
    let started = Rc::new(Client { trial: Rc::clone(trial), client, clock, site_states, process, open });
    if scene.drawn.faults.contains(&Fault::ClockJump) {
        let jumping = Rc::clone(&started);
        world.spawn(process, async move {
            loop {
                let scene = &jumping.trial.scene;
                scene.world.sleep(scene.world.random().heavy(4 * MILLIS)).await;
                mishaps::jump(scene, jumping.client, &jumping.clock);
            }
        });
    }
    for site in sites {
        let (started, site) = (Rc::clone(&started), Rc::clone(site));
        world.spawn(process, async move { started.work_at(&site).await });
    }
}

/// Whether the trial is over: a violation was found, or all operations have ended and every client has stopped.
pub(crate) fn is_done(scene: &Scene) -> bool {
    scene.violation.borrow().is_some()
        || scene.is_over()
            && scene.sites.iter().all(|site| site.node.is_served())
            && scene.clients.borrow()[..scene.drawn.clients as usize].iter().all(Option::is_none)
}

/// The sessions of a client with one node, and the state that the client's tasks share.
struct Session<F: Family> {
    fabrics: Vec<Reach>,
    shared: F::Shared,
    polled: Polled,
}

impl<F: Family> Default for Session<F> {
    fn default() -> Session<F> {
        Session { fabrics: Vec::new(), shared: F::Shared::default(), polled: Polled::default() }
    }
}

impl<F: Family> Session<F> {
    async fn close(&self, trial: &Trial<F>) {
        trial.family.leave(&trial.scene, &self.shared).await;
        for fabric in &self.fabrics {
            fabric.close().await;
        }
    }
}

/// A client's running process.
struct Client<F: Family> {
    trial: Rc<Trial<F>>,
    client: u32,
    clock: ProcessClock,
    /// State of the client at each site.
    site_states: Rc<[SiteState]>,
    process: ProcessId,
    /// Number of sites where the client is still working.
    open: Cell<usize>,
}

impl<F: Family> Client<F> {
    /// Carries out operations at one site until all operations of the trial have been started.
    async fn work_at(self: &Rc<Self>, site: &Rc<Site>) {
        let scene = &self.trial.scene;
        while !scene.is_over() {
            match self.connect(site).await {
                Ok(session) => self.work(site, session).await,
                Err(_) => scene.world.sleep(scene.world.random().heavy(AGAIN)).await,
            }
        }
        self.open.set(self.open.get() - 1);
        if self.open.get() == 0 {
            scene.clients.borrow_mut()[self.client as usize] = None;
        }
    }

    async fn connect(&self, site: &Rc<Site>) -> Result<Session<F>, FabricError> {
        let (scene, site_state) = (&self.trial.scene, &self.site_states[site.index]);
        if F::SPANS {
            let pool = Pool::open(scene, self.client, self.process, &self.clock);
            if !self.trial.family.goes_on() {
                pool.reopen_none();
            }
            pool.all_opened(STARTS_WITHIN).await;
            return Ok(Session { fabrics: vec![Reach::Pool(pool)], ..Session::default() });
        }
        let incarnation = site_state.incarnation.get() + 1;
        site_state.incarnation.set(incarnation);
        scene.count(|counts| counts.sessions += 1);
        if scene.drawn.carrier == Carrier::Direct {
            let identity = Identity { identity: 0, incarnation, silence: SILENCE };
            let direct = self.open_session(site, 0, identity).await?;
            return Ok(Session { fabrics: vec![direct], ..Session::default() });
        }
        mishaps::on_request(scene, site, self.client, IDLE);
        let identity = Identity { identity: u128::from(self.client) + 1, incarnation, silence: SILENCE };
        let engines = site.node.options().engines;
        let mut fabrics = Vec::new();
        for other in 0..self.trial.family.sessions() {
            let engine = (self.client + other) % engines;
            fabrics.push(self.open_session(site, engine, identity).await?);
        }
        if self.trial.family.is_one_sided() {
            site_state.settle_session(&self.trial); // The previous session has ended, and so have its chains.
        }
        Ok(Session { fabrics, ..Session::default() })
    }

    /// Opens a session with an engine of the site's node, over the trial's carrier.
    async fn open_session(&self, site: &Site, engine: u32, identity: Identity) -> Result<Reach, FabricError> {
        let Client { trial, client, process, clock, .. } = self;
        open_session(&trial.scene, site, *client, engine, *process, clock, identity).await.map(Reach::Node)
    }

    /// Carries out operations over one session, several concurrently, until the session ends.
    async fn work(self: &Rc<Self>, site: &Rc<Site>, session: Session<F>) {
        let scene = &self.trial.scene;
        let (session, tasks) = (Rc::new(session), Rc::new(Cell::new(scene.drawn.tasks)));
        for _ in 1..scene.drawn.tasks {
            let (mine, site) = (Rc::clone(self), Rc::clone(site));
            let (session, tasks) = (Rc::clone(&session), Rc::clone(&tasks));
            scene.world.spawn(self.process, async move {
                mine.run_all(&site, &session).await;
                tasks.set(tasks.get() - 1);
            });
        }
        self.run_all(site, &session).await;
        tasks.set(tasks.get() - 1);
        while tasks.get() > 0 {
            scene.world.sleep(20 * MICROS).await;
        }
        session.close(&self.trial).await;
    }

    async fn run_all(&self, site: &Rc<Site>, session: &Session<F>) {
        let scene = &self.trial.scene;
        let Some(mut worker) = self.open_store(site, session).await else {
            // The node may still be creating the store.
            return scene.world.sleep(scene.world.random().heavy(AGAIN)).await;
        };
        while scene.left.get() > 0 {
            scene.left.set(scene.left.get() - 1);
            if scene.is_about_recoverers() {
                // Few operations are to meet many steps of recoverers.
                let waits = scene.world.random().heavy(AWAITS_RECOVERERS).min(AWAITS_RECOVERERS_MAX);
                let until = scene.world.now() + waits;
                while scene.awaiting.get() == 0 && scene.world.now() < until {
                    scene.world.sleep(20 * MICROS).await;
                }
            }
            if worker.run_next().await.is_err() {
                return;
            }
            let is_struck = mishaps::on_request(scene, scene.any_site(site), self.client, IDLE);
            if is_struck || scene.world.random().one_in(3) {
                scene.world.sleep(scene.world.random().heavy(self.trial.family.rest())).await;
            }
        }
    }

    /// Opens the store that the site has now. Returns a worker with a client of the store.
    async fn open_store<'a>(&'a self, site: &'a Rc<Site>, session: &Session<F>) -> Option<Worker<'a, F>> {
        let Trial { scene, family, .. } = &*self.trial;
        let (name, store, contents) = (site.store_name(), site.store.get(), site.contents.get());
        let tracked = |fabric: &Reach| {
            let tracked = Tracked::new(fabric.clone(), scene, self.client, site.index);
            if F::SPANS { tracked.sharing(&session.polled) } else { tracked }
        };
        let fabrics: Vec<Tracked> = session.fabrics.iter().map(tracked).collect();
        let fabric = fabrics[0].clone();
        let seat = Seat {
            scene,
            site,
            client: self.client,
            process: self.process,
            fabrics,
            shared: &session.shared,
            first_key: first_key(site, contents),
        };
        let opened = match family.open(seat, site.node.id(), &name).await {
            Ok(opened) => opened,
            Err(failure) => {
                if failure.kind == FailureKind::Wrong {
                    scene.blame(failure.message);
                }
                return None;
            }
        };
        // Another store may have taken the place of this one meanwhile.
        if name == site.store_name() {
            let opened = if F::SPANS { &scene.sites[..] } else { std::slice::from_ref(site) };
            opened.iter().for_each(|site| site.is_opened.set(true));
        }
        Some(Worker { client: self, site, fabric, store, contents, opened })
    }
}

/// Error: the session is no longer usable.
struct SessionOver;

/// Task that carries out one operation after the other at one store.
struct Worker<'a, F: Family> {
    client: &'a Client<F>,
    site: &'a Rc<Site>,
    fabric: Tracked,
    store: u32,
    /// The store's contents that the client uses.
    contents: u32,
    opened: F::Client,
}

impl<F: Family> Worker<'_, F> {
    async fn run_next(&mut self) -> Result<(), SessionOver> {
        let Trial { scene, family, .. } = &*self.client.trial;
        mishaps::on_operation(scene, self.site);
        let (key, ask) = self.doubtful_read().unwrap_or_else(|| family.draw(scene, &mut self.opened));
        let id = self.call(key, ask.clone());
        let random = scene.world.random();
        // An operation on several nodes makes its requests to all of them at once.
        let requests_max = if F::SPANS { 4 * scene.sites.len() as u64 } else { 4 };
        let plan = random
            .one_in(scene.drawn.drop_one_in)
            .then(|| Plan { requests: random.below(requests_max) as u32, polls: random.below(6) as u32 });
        let watch = scene.outages.begin(scene, self.client.client);
        let running = Counted::new(&scene.running);
        let outcome = self.perform(key, &ask, plan).await;
        drop(running);
        if F::SPANS
            && let Some(outcome) = &outcome
        {
            // Without replicas, an operation fails if one node is not reached.
            let judges_failures = F::IS_REPLICATED;
            // A client whose session is over, since it was fenced, goes on as another one.
            let counts = |failure: &&Failure| {
                use FailureKind::{Interrupted, NoIds, Over};
                !matches!(failure.kind, NoIds | Interrupted | Over)
            };
            let failure = outcome.as_ref().err().filter(counts).filter(|_| judges_failures);
            let failure = failure.map(|failure| &failure.message[..]);
            let judged = match family.waits_for_others() || !judges_failures {
                true => watch.judge_by_all(scene, failure),
                false => watch.judge(scene, failure),
            };
            judged.err().into_iter().for_each(|why| scene.blame(format!("'{ask}' of key {key} {why}")));
        }
        match outcome {
            Some(Ok(outcome)) => self.returned(id, outcome),
            Some(Err(failure)) => return self.failed(id, &failure, ask.is_read()),
            None => {
                scene.count(|counts| counts.given_up += 1);
                // If the client's own CPU runs its chains, a dropped operation has ended. Over a session, the chains of
                // a dropped operation may run until the session ends.
                if scene.drawn.carrier == Carrier::Direct && family.is_one_sided() {
                    self.returned(id, OutcomeOf::<F>::UNKNOWN);
                }
            }
        }
        if let Err(failure) = family.trespass(scene, &mut self.opened).await {
            self.blame(&failure);
            return Err(SessionOver);
        }
        Ok(())
    }

    /// Carries out an operation. Returns `None` if `plan` cancelled the operation.
    async fn perform(
        &mut self,
        key: u64,
        ask: &F::Ask,
        plan: Option<Plan>,
    ) -> Option<Result<OutcomeOf<F>, Failure>> {
        let Trial { scene, family, .. } = &*self.client.trial;
        let operation = family.perform(scene, &mut self.opened, self.client.client, key, ask);
        // A client of many nodes may run some chains of its own in the caller's future. A real CPU completes these.
        let completes = F::SPANS && scene.drawn.carrier == Carrier::Direct && family.is_owned();
        let plan = plan.filter(|_| !completes);
        if family.is_owned() && plan.is_some() {
            return within(&scene.world, scene.world.random().heavy(DROPPED_AFTER), operation).await;
        }
        self.fabric.carry_out(plan, operation).await
    }

    fn state(&self) -> &SiteState {
        &self.client.site_states[self.site.index]
    }

    fn unanswered(&self) -> &RefCell<Vec<OperationId>> {
        &self.state().unanswered
    }

    /// Returns a read of a key that an operation of the client's last session may have written. Returns `None` if none
    /// is left, or if it was a key of other contents of the store.
    fn doubtful_read(&self) -> Option<(u64, F::Ask)> {
        let read = self.client.trial.family.read()?;
        let key = self.state().doubtful.borrow_mut().pop()?;
        let key = key.checked_sub(first_key(self.site, self.contents)).filter(|key| *key < KEYS_PER_STORE)?;
        Some((key, read))
    }

    fn call(&self, key: u64, ask: F::Ask) -> OperationId {
        let Client { trial, client, .. } = self.client;
        let key = first_key(self.site, self.contents) + key;
        let id = trial.history.borrow_mut().call(*client, key, ask, trial.scene.world.now());
        self.unanswered().borrow_mut().push(id);
        id
    }

    fn returned(&self, id: OperationId, outcome: OutcomeOf<F>) {
        self.unanswered().borrow_mut().retain(|unanswered| *unanswered != id);
        self.client.trial.returned(id, outcome);
    }

    /// Records the outcome of a failed operation. Returns an error if the session is no longer usable.
    fn failed(&self, id: OperationId, failure: &Failure, is_read: bool) -> Result<(), SessionOver> {
        let scene = &self.client.trial.scene;
        let is_unknown = !is_read && failure.ran != Ran::No;
        scene.count(|counts| match failure.kind {
            FailureKind::OutOfMemory => counts.out_of_memory += 1,
            _ if is_unknown => counts.unknown += 1,
            _ => counts.failed += 1,
        });
        if failure.kind == FailureKind::OutOfMemory {
            // Each member of a store on all nodes has the same quota, whatever faults its node draws.
            let faults = if F::SPANS { &scene.drawn.faults } else { &self.site.faults };
            if faults.contains(&Fault::Exhaustion) {
                scene.struck.count(Fault::Exhaustion, Target::None);
                let phase = self.client.trial.family.exhausted_in(self.fabric.last_phase());
                scene.flights.strike_phase(Fault::Exhaustion, phase);
            } else if !scene.has_node_stood_still() {
                scene
                    .blame("an operation found no memory, although the node had more than enough".to_owned());
            }
        }
        let of_disk = match failure.kind {
            FailureKind::DiskFull | FailureKind::Unpaired => {
                Some((Fault::DiskFull, "found the disk full, although it has space"))
            }
            FailureKind::SyncFailed => {
                Some((Fault::SyncFailure, "found a failed log, although its disk is sound"))
            }
            _ => None,
        };
        if let Some((fault, wrong)) = of_disk {
            if self.site.faults.contains(&fault) {
                scene.struck.count(fault, Target::None);
                scene.flights.strike_phase(fault, self.fabric.last_phase());
            } else {
                scene.blame(format!("an operation {wrong}: {}", failure.message));
            }
        }
        if matches!(failure.kind, FailureKind::SyncFailed | FailureKind::Unpaired) {
            mishaps::restart_soon(scene, self.site);
        }
        self.blame(failure);
        if !is_unknown {
            self.returned(id, OutcomeOf::<F>::FAILED);
        }
        match failure.kind {
            FailureKind::OutOfMemory
            | FailureKind::Declined
            | FailureKind::DiskFull
            | FailureKind::SyncFailed
            | FailureKind::Unpaired
            | FailureKind::Interrupted
            | FailureKind::NoIds => Ok(()),
            FailureKind::Refused | FailureKind::Wrong | FailureKind::Over => Err(SessionOver),
        }
    }

    /// Reports the failure as a violation of the trial, if it is one.
    fn blame(&self, failure: &Failure) {
        // In a dropped store, any access may be denied.
        let is_current = self.store == self.site.store.get();
        if failure.kind == FailureKind::Wrong || failure.kind == FailureKind::Refused && is_current {
            self.client.trial.scene.blame(failure.message.clone());
        }
    }
}

/// After all clients have stopped, starts another client that reads everything. This exposes lost data that no client
/// has read after the loss.
pub(crate) fn read_all<F: Family>(trial: &Rc<Trial<F>>) {
    let scene = &trial.scene;
    if scene.violation.borrow().is_some() || scene.sites.iter().any(|site| !site.node.is_served()) {
        return;
    }
    scene.network.set_fault_rates(FaultRates::NONE);
    if F::SPANS {
        recoverers::stop(scene);
        scene.world.run_until(scene.outages.last_end());
        if !scene.recoverers().is_empty() {
            recoverers::finish(trial);
        }
    }
    for site in if F::SPANS { &scene.sites[..1] } else { &scene.sites } {
        let process = scene.world.start_process();
        let client = scene.drawn.clients;
        let client = Client {
            trial: Rc::clone(trial),
            client,
            clock: ProcessClock::new(&scene.world, 0, &scene.struck, Target::Client(client)),
            site_states: scene.sites.iter().map(|_| SiteState::default()).collect(),
            process,
            open: Cell::new(1),
        };
        let (done, theirs, site) = (Rc::new(Cell::new(None)), Rc::clone(site), Rc::clone(site));
        let set = Rc::clone(&done);
        scene.world.spawn(process, async move { set.set(Some(client.read_store(&theirs).await)) });
        let until = scene.world.now() + 10 * SECONDS + scene.drawn.keys * READ_WITHIN;
        scene.world.run_while(until, || {
            let is_done = done.take();
            let continues = is_done.is_none();
            done.set(is_done);
            continues
        });
        match done.take() {
            Some(Ok(())) => {}
            Some(Err(error)) => {
                scene.blame(format!("a client cannot connect after the faults have ended: {error}"))
            }
            None => scene.blame(format!(
                "reading all of node {} does not end, after the faults have ended",
                site.index
            )),
        }
    }
}

impl<F: Family> Client<F> {
    /// Reads all keys of the site's store.
    async fn read_store(&self, site: &Rc<Site>) -> Result<(), FabricError> {
        let Trial { scene, family, .. } = &*self.trial;
        let fabric = if F::SPANS {
            let pool = Pool::open(scene, self.client, self.process, &self.clock);
            pool.all_opened(SECONDS).await;
            Reach::Pool(pool)
        } else {
            let identity = Identity { identity: u128::MAX, incarnation: 1, silence: SILENCE };
            self.open_session(site, 0, identity).await?
        };
        let session = Session { fabrics: vec![fabric], ..Session::default() };
        let Some(mut worker) = self.open_store(site, &session).await else {
            // The node may have died before it created the store.
            if site.is_opened.get() {
                scene.blame("an existing store cannot be opened after the faults have ended".to_owned());
            }
            return Ok(());
        };
        for (key, ask) in family.read_all(scene) {
            let id = worker.call(key, ask.clone());
            let outcome = worker.perform(key, &ask, None).await.expect("without a plan, it is not cancelled");
            let outcome = outcome.unwrap_or_else(|failure| {
                let message = failure.message;
                scene.blame(format!("'{ask}' of key {key} fails after the faults have ended: {message}"));
                OutcomeOf::<F>::FAILED
            });
            worker.returned(id, outcome);
        }
        if let Err(failure) = family.heal(scene, &mut worker.opened).await {
            scene.blame(format!("healing fails after the faults have ended: {}", failure.message));
        }
        drop(worker);
        session.close(&self.trial).await;
        Ok(())
    }
}

/// Checks, after the faults have ended, that no buffer is lost or held twice. Every buffer must be reachable or free,
/// or become free.
pub(crate) fn audit<F: Family>(trial: &Rc<Trial<F>>) {
    let scene = &trial.scene;
    if scene.violation.borrow().is_some() || scene.sites.iter().any(|site| !site.node.is_served()) {
        return;
    }
    // In a calm trial nothing was interrupted, so no buffer is leaked, and the counts must agree without a scan.
    let left_nothing = [Fault::ClientDeath, Fault::NodeRestart, Fault::NodeLoss, Fault::Revocation];
    let is_calm = left_nothing.into_iter().all(|fault| scene.struck.of(fault) == 0)
        && matches!(scene.counts.get(), Counts { unknown: 0, failed: 0, given_up: 0, .. });
    for site in &scene.sites {
        let (theirs, site) = (Rc::clone(trial), Rc::clone(site));
        let is_opened = site.is_opened.get();
        let audited = scene.world.complete(20 * SECONDS, async move {
            let Trial { scene, family, .. } = &*theirs;
            let (node, name) = (&site.node, site.store_name());
            if scene.is_replicated && !scene.configurations.holds(&site) {
                let found = node.answer(control::Ask::StoreStat { name }).await;
                return found
                    .map_or(Ok(()), |found| Err(format!("a node without a member has a store: {found:?}")));
            }
            // Sessions of dead clients time out first. Then the node scans for the buffers that they held.
            scene.world.sleep(4 * SILENCE).await;
            if is_calm || F::IS_REPLICATED {
                compare(node, &name).await?;
            }
            // The engine of a node carries out a chain as a whole, also if its client dies.
            let found = node.info().map_or(0, |info| info.scanned_buffers);
            if F::IS_REPLICATED
                && found > 0
                && scene.drawn.carrier != Carrier::Direct
                && !site.was_killed.get()
            {
                return Err(format!("scans of node {} found {found} leaked buffers", site.index));
            }
            node.answer(control::Ask::Scan { name: name.clone() }).await?;
            scene.world.sleep(20 * MILLIS).await;
            family.audit(scene, node, &name).await?;
            compare(node, &name).await
        });
        match audited {
            Some(Ok(())) => {}
            // The node may have died before it created the store.
            Some(Err(reason)) if reason.contains("no store") && !is_opened => {}
            Some(Err(reason)) => scene.blame(reason),
            None => scene.blame("a scan does not end, after the faults have ended".to_owned()),
        }
    }
}

/// Checks that the number of a store's live buffers equals the number of buffers that the store's structure reaches.
async fn compare(node: &Node, name: &str) -> Result<(), String> {
    let stat = node.answer(control::Ask::StoreStat { name: name.to_owned() }).await?;
    let Answer::StoreStat(stat) = stat else { return Err(format!("{stat:?}")) };
    let reachable = node.reachable(name)?;
    if stat.live_buffers != reachable {
        return Err(format!(
            "{} buffers are live and {reachable} are reachable: {stat:?}",
            stat.live_buffers
        ));
    }
    if stat.retired_buffers > 0 {
        let retired = stat.retired_buffers;
        return Err(format!("{retired} retired buffers are not freed after the faults have ended: {stat:?}"));
    }
    Ok(())
}
