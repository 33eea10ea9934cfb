//! Faults that strike processes, hosts and stores while the clients work.

use crate::flight::IDLE;
use crate::{Carrier, Scene, Site, create_next_store, rates};
use farside_remote::control::Ask;
use farside_sim::fault::{Fault, FaultRates, OUTAGE, Target};
use farside_sim::world::{MICROS, MILLIS, Nanos, ProcessId};
use std::rc::Rc;

/// Usual length, in nanoseconds, of the period before a client's death in which all the client's messages are delayed.
const LAST_WORDS: Nanos = 100 * MICROS;

/// Faults that strike processes, hosts and stores at random times. `FaultRates` has the faults of single messages.
const EVENTS: [Fault; 8] = [
    Fault::Partition,
    Fault::OneWayPartition,
    Fault::ClientDeath,
    Fault::ClientPause,
    Fault::NodePause,
    Fault::NodeRestart,
    Fault::NodeLoss,
    Fault::Revocation,
];

/// Usual delay, in nanoseconds, from an operation to the fault that the operation triggers.
const SOON: Nanos = 20 * MICROS;

/// Sets the fault rates of messages at every node.
pub(crate) fn begin(scene: &Scene) {
    scene.sites.iter().for_each(|site| scene.network.set_fault_rates_of(site.node.host(), rates(site)));
}

/// Runs when an operation starts. With the drawn probability, triggers a fault, a scan or a rebuild soon after.
/// Because operations trigger faults, the faults strike working clients and do not pile up while clients cannot work.
pub(crate) fn on_operation(scene: &Rc<Scene>, site: &Rc<Site>) {
    let (drawn, random) = (&scene.drawn, scene.world.random());
    if random.one_in(drawn.mishap_one_in) {
        let mut faults = EVENTS.into_iter().filter(|fault| site.faults.contains(fault));
        let count = faults.clone().count() as u64;
        if count > 0 {
            let fault = faults.nth(random.below(count) as usize).expect("the index is less than the count");
            soon(scene, site, move |scene, site| {
                // These faults are rarer than the others, since each replaces a process, memory or a store.
                let is_rare = matches!(fault, Fault::NodeRestart | Fault::NodeLoss | Fault::Revocation);
                if is_rare && !scene.world.random().one_in(3) {
                    return;
                }
                let client = scene.world.random().below(scene.drawn.clients.into());
                strike(scene, site, fault, client as usize);
            });
        }
    }
    if random.one_in(drawn.scan_one_in) {
        soon(scene, site, |_, site| site.node.ask(Ask::Scan { name: site.store_name() }));
    }
    if random.one_in(drawn.rebuild_one_in) {
        let parameters = (scene.rebuilt)(random);
        soon(scene, site, move |scene, site| {
            site.node.ask(Ask::RebuildStore { name: site.store_name(), parameters });
            // The node may also pause at any time within the rebuild.
            let random = scene.world.random();
            if site.faults.contains(&Fault::NodePause) && random.one_in(2) {
                let at = scene.world.now() + (MICROS << random.below(10));
                let (theirs, site) = (Rc::clone(scene), Rc::clone(site));
                scene.world.at(at, move || pause_node(&theirs, &site));
            }
        });
    }
}

/// Runs when a request of `phase` starts or, for the idle phase, when a client has no request in flight. With the
/// drawn probability, a fault strikes the request, and possibly other requests too. Returns whether a fault strikes.
///
/// Once a phase has been struck ten times per operation of the trial, this function no longer strikes it. Without this
/// bound, a client that dies each time it is idle would never start an operation.
pub(crate) fn on_request(scene: &Rc<Scene>, site: &Rc<Site>, client: u32, phase: usize) -> bool {
    let (drawn, random) = (&scene.drawn, scene.world.random());
    let is_saturated = || scene.flights.struck_in(phase) >= 10 * u64::from(drawn.operations);
    if drawn.focus != Some(phase) || scene.is_over() || is_saturated() || !random.one_in(drawn.within_one_in)
    {
        return false;
    }
    let mut faults: Vec<Fault> =
        site.faults.iter().copied().filter(|fault| !BY_THEMSELVES.contains(fault)).collect();
    random.shuffle(&mut faults);
    // Choose the fault that has struck least within this phase.
    let least = faults.into_iter().min_by_key(|fault| scene.flights.struck(*fault, phase));
    let Some(fault) = least else { return false };
    if phase == IDLE && fault.is_of_messages() {
        // Planned for later, the fault could miss the next message, which may leave before any other event.
        scene.network.strike_next_message(scene.hosts[client as usize], fault);
        return true;
    }
    let after = if phase == IDLE { 0 } else { random.below(1 << random.below(13)) };
    let at = scene.world.now() + after;
    let (theirs, site) = (Rc::clone(scene), Rc::clone(site));
    scene.world.at(at, move || {
        if !theirs.is_over() {
            strike(&theirs, &site, fault, client as usize);
        }
    });
    true
}

/// Faults that strike without being triggered by this module.
const BY_THEMSELVES: [Fault; 2] = [Fault::ClockSkew, Fault::Exhaustion];

fn soon(scene: &Rc<Scene>, site: &Rc<Site>, happen: impl FnOnce(&Rc<Scene>, &Rc<Site>) + 'static) {
    let at = scene.world.now() + scene.world.random().heavy(SOON);
    let (theirs, site) = (Rc::clone(scene), Rc::clone(site));
    scene.world.at(at, move || {
        if !theirs.is_over() {
            happen(&theirs, &site);
        }
    });
}

fn strike(scene: &Rc<Scene>, site: &Rc<Site>, fault: Fault, client: usize) {
    let (world, random) = (&scene.world, scene.world.random());
    let process = scene.clients.borrow()[client];
    match fault {
        // This client runs in the node's process, so it cannot be struck alone.
        Fault::ClientDeath | Fault::ClientPause if scene.drawn.resident == Some(client as u32) => {}
        Fault::ClientDeath => {
            let Some(process) = process else { return };
            if !site.faults.contains(&Fault::Delay) || random.one_in(2) {
                return kill(scene, client, process);
            }
            // The client's last messages are delayed and arrive when its next process already runs.
            let late = FaultRates { delay_one_in: 1, ..rates(site) };
            scene.network.set_fault_rates_of(site.node.host(), late);
            let (theirs, site) = (Rc::clone(scene), Rc::clone(site));
            world.at(world.now() + random.heavy(LAST_WORDS), move || {
                if !theirs.is_over() {
                    theirs.network.set_fault_rates_of(site.node.host(), rates(&site));
                    kill(&theirs, client, process);
                }
            });
        }
        Fault::ClientPause => pause(scene, process, fault, Target::Client(client as u32)),
        Fault::NodePause => pause_node(scene, site),
        Fault::Partition | Fault::OneWayPartition => {
            let (node, host) = (site.node.host(), scene.hosts[client]);
            let until = world.now() + outage(scene);
            let [from, to] = if random.one_in(2) { [node, host] } else { [host, node] };
            scene.network.cut(from, to, until, fault);
            if fault == Fault::Partition {
                scene.network.cut(to, from, until, fault);
            }
        }
        // The node is already down and cannot be struck again.
        Fault::NodeRestart | Fault::NodeLoss | Fault::Revocation if !site.node.is_served() => {}
        Fault::NodeRestart => take_down(scene, site, fault, take_over),
        Fault::NodeLoss => take_down(scene, site, fault, |scene, site| {
            site.node.lose_memory();
            create_next_store(scene, site);
        }),
        Fault::Revocation => {
            scene.struck.count(fault, site.target());
            site.node.ask(Ask::DropStore { name: site.store_name() });
            create_next_store(scene, site);
        }
        _ if fault.is_of_messages() => scene.network.strike_next_message(scene.hosts[client], fault),
        Fault::ClockJump => {
            let clock = scene.clocks.borrow()[client].clone();
            clock.into_iter().for_each(|clock| clock.jump(random.heavy(MILLIS)));
        }
        _ => unreachable!("{fault:?} is not triggered here"),
    }
}

fn kill(scene: &Scene, client: usize, process: ProcessId) {
    if scene.world.is_alive(process) {
        scene.struck.count(Fault::ClientDeath, Target::Client(client as u32));
        scene.world.kill(process);
    }
}

/// Kills the node's process, and calls `bring_up` after a random delay.
fn take_down(
    scene: &Rc<Scene>,
    site: &Rc<Site>,
    fault: Fault,
    bring_up: impl FnOnce(&Rc<Scene>, &Rc<Site>) + 'static,
) {
    scene.struck.count(fault, site.target());
    site.node.kill();
    end_runners(scene);
    let (theirs, site) = (Rc::clone(scene), Rc::clone(site));
    let after = scene.world.random().heavy(MILLIS);
    scene.world.at(scene.world.now() + after, move || bring_up(&theirs, &site));
}

/// Starts the node's next process, which recovers the memory of the node's last process. The next process may itself
/// die during recovery.
fn take_over(scene: &Rc<Scene>, site: &Rc<Site>) {
    site.node.restart();
    let random = scene.world.random();
    if random.one_in(2) {
        let (theirs, site) = (Rc::clone(scene), Rc::clone(site));
        let process = site.node.process();
        scene.world.at(scene.world.now() + random.heavy(20 * MICROS), move || {
            // If another fault has killed this process, that fault starts the successor.
            if !site.node.is_served() && site.node.process() == process {
                take_down(&theirs, &site, Fault::NodeRestart, take_over);
            }
        });
    }
}

/// Kills the processes that ran chains on the node's memory themselves. They must be dead before another process
/// serves this memory.
fn end_runners(scene: &Rc<Scene>) {
    if scene.drawn.carrier == Carrier::Direct {
        let processes: Vec<ProcessId> = scene.clients.borrow().iter().flatten().copied().collect();
        processes.into_iter().for_each(|process| scene.world.kill(process));
    }
}

fn pause_node(scene: &Rc<Scene>, site: &Site) {
    pause(scene, site.node.process(), Fault::NodePause, site.target());
}

fn pause(scene: &Rc<Scene>, process: Option<ProcessId>, fault: Fault, target: Target) {
    let Some(process) = process.filter(|process| !scene.world.is_stopped(*process)) else { return };
    scene.struck.count(fault, target);
    scene.world.stop(process);
    let theirs = Rc::clone(scene);
    scene.world.at(scene.world.now() + outage(scene), move || theirs.world.resume(process));
}

fn outage(scene: &Scene) -> Nanos {
    let [least, most] = OUTAGE;
    let random = scene.world.random();
    random.between(least, least << random.below((most / least).ilog2().into()))
}
