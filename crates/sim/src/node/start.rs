//! Starts of the processes that serve a node: with fresh memory, or with the memory and the logs that the last process
//! or a crash of the machine left.

use super::{Inner, Node, Options, Serving, engine};
use crate::clock::ProcessClock;
use crate::fault::Target;
use crate::memory::{Access, Bytes, Pace, Replay};
use crate::nic::Nic;
use crate::world::{Bell, MICROS, MILLIS, ProcessId, Turnstile, World};
use farside_node::log::resume::{Ended, Host, ResumeError, Resuming, StartMemory};
use farside_node::log::{Disk, LogOptions, RecoverError, SyncPolicy, find};
use farside_node::node::Node as Machine;
use farside_remote::Width;
use farside_remote::arena::header;
use farside_remote::control::{NodeInfo, Store};
use farside_remote::draws::Draws;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

impl StartMemory for Replay {
    fn run_at_once<R>(&self, code: impl FnOnce(&Replay) -> Result<R, Access>) -> R {
        Replay::run_at_once(self, code)
    }
}

/// The host of a process that recovers logs, which takes no time.
struct Starting<'a> {
    world: &'a World,
    /// Number of steps before that with which the process ends, if it does.
    left: Option<u64>,
}

impl Host for Starting<'_> {
    fn random(&mut self) -> u64 {
        self.world.random().bits()
    }

    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn step_done(&mut self) -> Result<(), Ended> {
        match &mut self.left {
            Some(0) => Err(Ended),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

/// Speed of accesses during recovery. Few accesses wait, since each wait makes the code replay all earlier accesses of
/// its run.
const TAKES_OVER: Pace =
    Pace { usual_ns: MICROS, late_one_in: 100, stalled_one_in: 100, relaxed: false, by_cpu: true };
/// One in this many starts of a node with logs ends while it recovers them.
const ENDED_START_ONE_IN: u64 = 4;
impl Node {
    /// Kills the process that serves the node or recovers the node's memory. The memory survives.
    pub fn kill(&self) {
        self.0.serving.take();
        if let Some(process) = self.0.process.take() {
            for engine in 0..self.0.options.engines {
                self.0.network.hang_up_all(self.engine(engine));
            }
            self.0.world.kill(process);
        }
    }

    /// Starts a process that recovers the memory left by the last one, access by access, and then serves it. All
    /// processes that ran chains on this memory themselves must be dead.
    pub fn restart(&self) {
        self.kill();
        let Inner { world, seen, .. } = &*self.0;
        let process = world.start_process();
        self.0.process.set(Some(process));
        let memory = Replay::new(world, &self.memory(), TAKES_OVER).seen_by(seen);
        let node = self.clone();
        world.spawn(process, async move {
            let info = node.info_of(process);
            let restored =
                memory.run(|memory| Machine::restore(memory, (node.0.kinds)(), info.clone())).await;
            let mut machine =
                restored.unwrap_or_else(|reason| panic!("the node cannot recover its memory: {reason}"));
            if !node.0.is_same_boot.get() {
                node.lose_pages(&machine);
            }
            while !memory
                .run(|memory| machine.recover_step(memory))
                .await
                .unwrap_or_else(|reason| panic!("the node cannot recover its services: {reason}"))
            {
            }
            node.serve(process, machine);
        });
    }

    /// Kills the node's process and starts another with fresh memory.
    pub fn lose_memory(&self) {
        self.kill();
        self.0.disk.borrow_mut().crash(self.0.world.random());
        *self.0.memory.borrow_mut() = fresh(&self.0.world, &self.0.options);
        self.begin();
    }

    /// Crashes the node's machine and starts a process that recovers what the memory file and the disk have kept. Pages
    /// of tables of stores with logs may be lost: they have zeros. All processes that ran chains on this memory
    /// themselves must be dead.
    pub fn crash_machine(&self) {
        self.kill();
        self.0.disk.borrow_mut().crash(self.0.world.random());
        self.0.is_same_boot.set(false);
        self.restart();
    }

    /// Loses half of the pages of the tables of stores with logs.
    fn lose_pages(&self, machine: &Machine<Replay>) {
        const PAGE: usize = 4096;
        let (memory, random) = (self.memory(), self.0.world.random());
        let is_logged = |store: &Store| {
            self.0.options.log.is_some()
                && machine.catalog().kind(&store.kind).is_ok_and(|kind| kind.is_logged())
        };
        for entry in machine.catalog().iter().filter(|entry| is_logged(&entry.store)) {
            let table = entry.store.table_at..entry.store.table_at + entry.store.table_len;
            for at in table.step_by(PAGE) {
                let mut page = [0; PAGE];
                memory.peek(at, &mut page);
                if page != [0; PAGE] && random.one_in(2) {
                    memory.poke(at, &[0; PAGE]);
                }
            }
        }
    }

    /// Starts a process that serves the node with fresh memory.
    pub(super) fn begin(&self) {
        let process = self.0.world.start_process();
        self.0.process.set(Some(process));
        let memory = Replay::new(&self.0.world, &self.memory(), Pace::AT_ONCE);
        self.serve(process, Machine::new(&memory, (self.0.kinds)(), self.info_of(process)));
    }

    fn info_of(&self, process: ProcessId) -> NodeInfo {
        NodeInfo {
            pid: process.0,
            incarnation: self.incarnation(),
            memory_bytes: self.0.options.memory_bytes,
            ..NodeInfo::default()
        }
    }

    /// Makes all stores and their logs agree, at one instant.
    ///
    /// # Errors
    /// The process ends in between.
    fn recover_logs(&self, machine: &mut Machine<Replay>, options: LogOptions) -> Result<(), Ended> {
        let Inner { world, is_same_boot, .. } = &*self.0;
        let memory = Replay::new(world, &self.memory(), Pace::AT_ONCE);
        let disk = &mut *self.0.disk.borrow_mut();
        machine.set_logging(options);
        let found = find(disk).expect("the heads of logs are valid");
        // From a source of its own, so that other runs stay as they are. Most recoveries have few steps besides the
        // replayed records.
        let mut draws = Draws(self.incarnation() ^ self.process().map_or(0, |process| process.0.into()));
        let ends = !found.is_empty() && draws.once_in(ENDED_START_ONE_IN);
        let most = draws.below(8);
        let left = ends.then(|| draws.below(1 << most));
        let mut host = Starting { world, left };
        let is_same_boot = is_same_boot.get();
        for mut found in found {
            loop {
                let host = &mut host;
                let mut at = Resuming { disk, node: machine, memory: &memory, options, is_same_boot, host };
                match at.resume(&found) {
                    Ok(()) => break,
                    Err(ResumeError::Ended) => return Err(Ended),
                    // A crash may lose a part in the middle. The operator cuts the file, as the error says.
                    Err(ResumeError::Log(RecoverError::Damaged(name, _, at)))
                        if options.sync == SyncPolicy::Never =>
                    {
                        disk.cut(&name, at).expect("the simulated disk cuts files");
                        let mut again = find(disk).expect("the heads of logs are valid").into_iter();
                        found = again.find(|again| again.folder == found.folder).expect("it is there");
                    }
                    Err(error) => panic!("a crash damages no log: {error}"),
                }
            }
            let refused = machine.refused();
            assert_eq!(refused, None, "a log has what its store had");
        }
        // A crash of the machine may lose a log that was just begun.
        for name in machine.unlogged() {
            let host = &mut host;
            let mut at = Resuming { disk, node: machine, memory: &memory, options, is_same_boot, host };
            match at.begin(&name) {
                Ok(()) => {}
                Err(ResumeError::Ended) => return Err(Ended),
                Err(error) => panic!("a store gets a log: {error}"),
            }
        }
        Ok(())
    }

    /// Ends the process that was to serve the node, and starts the next one soon, unless another fault does.
    fn end_start(&self, process: ProcessId) {
        let Inner { world, disk, ended_starts, is_same_boot, .. } = &*self.0;
        ended_starts.set(ended_starts.get() + 1);
        // The machine crashes again. What was written before its last crash is settled.
        if !is_same_boot.get() && world.random().one_in(2) {
            disk.borrow_mut().crash(world.random());
        }
        let node = self.clone();
        world.at(world.now() + world.random().heavy(MILLIS), move || {
            if !node.is_served() && node.process() == Some(process) {
                node.restart();
            }
        });
    }

    /// Starts the tasks of the process that serves the node.
    fn serve(&self, process: ProcessId, mut machine: Machine<Replay>) {
        if let Some(log) = self.0.options.log {
            // What a node reports of its logs is meant for its operator.
            let quiet = tracing::subscriber::NoSubscriber::default();
            let recovered = tracing::subscriber::with_default(quiet, || self.recover_logs(&mut machine, log));
            if recovered.is_err() {
                self.end_start(process);
                return;
            }
        }
        let Inner { world, network, options, seen, .. } = &*self.0;
        let bytes = self.memory();
        let memory = Replay::new(world, &bytes, options.pace).seen_by(seen);
        let engines = options.engines as usize;
        let nic = options.nic.map(|device| {
            let nic = Nic::new(world, &bytes, device.timing);
            nic.count_in(seen);
            // The process's registrations of memory end with the process.
            let stopped = nic.clone();
            world.on_death(process, move || stopped.stop());
            (nic, device)
        });
        let clock = ProcessClock::new(world, options.clock_ppm, network.struck(), Target::Node(self.0.id.0));
        clock.jump_wall(self.0.wall.get());
        let serving = Rc::new(Serving {
            this: RefCell::default(),
            process,
            world: world.clone(),
            clock,
            draws: RefCell::new(Draws(
                bytes.load(header::INCARNATION_AT, Width::W8) as u64 ^ u64::from(process.0),
            )),
            dates_stores: options.wall.is_some(),
            bytes,
            machine: RefCell::new(machine),
            memory,
            step: Turnstile::default(),
            letters: RefCell::default(),
            calls: RefCell::default(),
            begun: RefCell::default(),
            log_bell: Bell::default(),
            has_logs: Cell::new(false),
            disk: Rc::clone(&self.0.disk),
            disk_times: Rc::clone(&self.0.disk_times),
            bell: Bell::default(),
            recipients: RefCell::default(),
            mails: (0..engines).map(|_| Rc::default()).collect(),
            seen: Rc::clone(seen),
            idle_pause: options.idle_pause,
            nic,
            pairs: RefCell::default(),
            next_pair: Cell::new(0),
            on_chip_owners: Rc::default(),
        });
        *serving.this.borrow_mut() = Rc::downgrade(&serving);
        for index in 0..engines {
            let inbox = network.bind(self.engine(index as u32));
            let engine = engine::Engine::new(&serving, network, inbox, index, options);
            world.spawn(process, engine.run());
        }
        let server = Rc::clone(&serving);
        world.spawn(process, async move { server.run().await });
        *self.0.serving.borrow_mut() = Some(serving);
        self.0.is_same_boot.set(true);
        let once_served = self.0.once_served.take();
        once_served.into_iter().for_each(|act| act());
    }
}

/// Creates a fresh memory for a node.
pub(super) fn fresh(world: &World, options: &Options) -> Rc<Bytes> {
    let bytes = Bytes::new(options.memory_bytes);
    let words = [
        (header::MAGIC_AT, header::MAGIC),
        (header::VERSION_AT, header::VERSION),
        (header::SIZE_AT, options.memory_bytes),
        (header::INCARNATION_AT, world.random().bits() | 1),
    ];
    words.iter().for_each(|(at, word)| bytes.poke(*at, &word.to_le_bytes()));
    Rc::new(bytes)
}
