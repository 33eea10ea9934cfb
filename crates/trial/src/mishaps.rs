//! What happens to processes, hosts and stores while clients are at work.

use super::{Carrier, Scene, create_next_store, weather};
use farside_remote::control::Ask;
use farside_sim::fault::{Fault, OUTAGE, Weather};
use farside_sim::world::{MICROS, MILLIS, Nanos, ProcessId};
use std::rc::Rc;

/// For how long all that is sent before a client dies is late.
const LAST_WORDS: Nanos = 100 * MICROS;

/// What happens by itself, and not to messages.
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

/// How long it usually is from an operation to what it brings about.
const SOON: Nanos = 20 * MICROS;

/// From now on things go wrong with messages.
pub(super) fn begin(scene: &Scene) {
    scene.network.set_weather(weather(&scene.drawn));
}

/// An operation begins; now and then something happens soon. So what happens meets clients at work, and where they
/// cannot work, nothing more happens to them.
pub(super) fn perhaps(scene: &Rc<Scene>) {
    let (drawn, random) = (&scene.drawn, scene.world.random());
    if random.one_in(drawn.mishap_one_in) {
        let mut faults = EVENTS.into_iter().filter(|fault| drawn.faults.contains(fault));
        let count = faults.clone().count() as u64;
        if count > 0 {
            let fault = faults.nth(random.below(count) as usize).expect("there are so many");
            soon(scene, move |scene| strike(scene, fault));
        }
    }
    if random.one_in(drawn.scan_one_in) {
        soon(scene, |scene| scene.node.ask(Ask::Scan { name: scene.store_name() }));
    }
    if random.one_in(drawn.rebuild_one_in) {
        let items = random.between(4, 4 * drawn.items);
        soon(scene, move |scene| {
            let parameters = format!("{{\"items\": {items}}}");
            scene.node.ask(Ask::RebuildStore { name: scene.store_name(), parameters });
            // It stops within it, too, wherever that is.
            let random = scene.world.random();
            if scene.drawn.faults.contains(&Fault::NodePause) && random.one_in(2) {
                let (at, theirs) = (scene.world.now() + (MICROS << random.below(10)), Rc::clone(scene));
                scene.world.at(at, move || pause(&theirs, theirs.node.process(), Fault::NodePause));
            }
        });
    }
}

fn soon(scene: &Rc<Scene>, happen: impl FnOnce(&Rc<Scene>) + 'static) {
    let (at, theirs) = (scene.world.now() + scene.world.random().heavy(SOON), Rc::clone(scene));
    scene.world.at(at, move || {
        if !theirs.is_over() {
            happen(&theirs);
        }
    });
}

fn strike(scene: &Rc<Scene>, fault: Fault) {
    let (world, random) = (&scene.world, scene.world.random());
    let client = random.below(scene.drawn.clients.into()) as usize;
    let process = scene.clients.borrow()[client];
    match fault {
        Fault::ClientDeath => {
            let Some(process) = process else { return };
            if !scene.drawn.faults.contains(&Fault::Delay) || random.one_in(2) {
                return kill(scene, process);
            }
            // What it sends last is late, and comes when its next process is there already.
            scene.network.set_weather(Weather { delay_one_in: 1, ..weather(&scene.drawn) });
            let theirs = Rc::clone(scene);
            world.at(world.now() + random.heavy(LAST_WORDS), move || {
                if !theirs.is_over() {
                    theirs.network.set_weather(weather(&theirs.drawn));
                    kill(&theirs, process);
                }
            });
        }
        Fault::ClientPause => pause(scene, process, fault),
        Fault::NodePause => pause(scene, scene.node.process(), fault),
        Fault::Partition | Fault::OneWayPartition => {
            let (node, host) = (scene.node.host(), scene.hosts[client]);
            let until = world.now() + outage(scene);
            let [from, to] = if random.one_in(2) { [node, host] } else { [host, node] };
            scene.network.cut(from, to, until, fault);
            if fault == Fault::Partition {
                scene.network.cut(to, from, until, fault);
            }
        }
        // Rarer than the rest: each begins a new story.
        Fault::NodeRestart | Fault::NodeLoss | Fault::Revocation if !random.one_in(3) => {}
        // It is down already.
        Fault::NodeRestart | Fault::NodeLoss | Fault::Revocation if !scene.node.is_served() => {}
        Fault::NodeRestart => take_down(scene, fault, take_over),
        Fault::NodeLoss => take_down(scene, fault, |scene| {
            scene.node.lose_memory();
            create_next_store(scene);
        }),
        Fault::Revocation => {
            scene.struck.count(fault);
            scene.node.ask(Ask::DropStore { name: scene.store_name() });
            create_next_store(scene);
        }
        _ => unreachable!("{fault:?} strikes messages, or clocks, or memory"),
    }
}

fn kill(scene: &Scene, client: ProcessId) {
    if scene.world.is_alive(client) {
        scene.struck.count(Fault::ClientDeath);
        scene.world.kill(client);
    }
}

/// The node's process ends, and after a while something takes its place.
fn take_down(scene: &Rc<Scene>, fault: Fault, bring_up: impl FnOnce(&Rc<Scene>) + 'static) {
    scene.struck.count(fault);
    scene.node.kill();
    end_runners(scene);
    let theirs = Rc::clone(scene);
    let after = scene.world.random().heavy(MILLIS);
    scene.world.at(scene.world.now() + after, move || bring_up(&theirs));
}

/// The node's next process takes over what the last one left, and may die of that, too.
fn take_over(scene: &Rc<Scene>) {
    scene.node.restart();
    let (random, theirs) = (scene.world.random(), Rc::clone(scene));
    if random.one_in(2) {
        let process = scene.node.process();
        scene.world.at(scene.world.now() + random.heavy(20 * MICROS), move || {
            // It may have died since of something else, which brings up another.
            if !theirs.node.is_served() && theirs.node.process() == process {
                take_down(&theirs, Fault::NodeRestart, take_over);
            }
        });
    }
}

/// Whoever ran chains on a memory that another node is to serve must be dead.
fn end_runners(scene: &Rc<Scene>) {
    if scene.drawn.carrier == Carrier::Direct {
        let processes: Vec<ProcessId> = scene.clients.borrow().iter().flatten().copied().collect();
        processes.into_iter().for_each(|process| scene.world.kill(process));
    }
}

fn pause(scene: &Rc<Scene>, process: Option<ProcessId>, fault: Fault) {
    let Some(process) = process.filter(|process| !scene.world.is_stopped(*process)) else { return };
    scene.struck.count(fault);
    scene.world.stop(process);
    let theirs = Rc::clone(scene);
    scene.world.at(scene.world.now() + outage(scene), move || theirs.world.resume(process));
}

fn outage(scene: &Scene) -> Nanos {
    let [least, most] = OUTAGE;
    let random = scene.world.random();
    random.between(least, least << random.below((most / least).ilog2().into()))
}
