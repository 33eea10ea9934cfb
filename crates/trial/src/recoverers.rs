//! Recoverers of a trial. Each is a process that has its own sessions, and repairs the store while clients use it. When
//! a recoverer's process dies, another one follows.
//!
//! Recoverers have the numbers after those of the clients and of the client that reads everything at the end.
//!
//! Invariant: several recoverers may run at the same time, and each may die between any two of its requests.

use crate::family::Family;
use crate::flight::Tracked;
use crate::pool::{Pool, Reach, STARTS_WITHIN};
use crate::{Scene, Trial, clock_of_next, mishaps};
use farside_sim::clock::ProcessClock;
use farside_sim::fault::{Fault, Target};
use farside_sim::world::{MICROS, MILLIS, ProcessId, SECONDS, within};
use std::rc::Rc;

/// One in this many recoveries is dropped: its future is dropped at one of its awaits.
const DROP_ONE_IN: u64 = 12;

/// Starts the recoverer with this number in a new process. Each time the process dies, starts another one.
pub(crate) fn start<F: Family>(trial: &Rc<Trial<F>>, number: u32) {
    let scene = &trial.scene;
    if !scene.is_recovering.get() {
        return;
    }
    let world = &scene.world;
    let process = world.start_process();
    scene.clients.borrow_mut()[number as usize] = Some(process);
    let theirs = Rc::clone(trial);
    world.on_death(process, move || {
        let scene = &theirs.scene;
        scene.clients.borrow_mut()[number as usize] = None;
        let at = scene.world.now() + scene.world.random().heavy(MILLIS / 2);
        let theirs = Rc::clone(&theirs);
        scene.world.at(at, move || start(&theirs, number));
    });
    let clock = clock_of_next(scene, number);
    scene.clocks.borrow_mut()[number as usize] = Some(clock.clone());
    if scene.drawn.faults.contains(&Fault::ClockJump) {
        let (theirs, clock) = (Rc::clone(scene), clock.clone());
        world.spawn(process, async move {
            loop {
                theirs.world.sleep(theirs.world.random().heavy(4 * MILLIS)).await;
                mishaps::jump(&theirs, number, &clock);
            }
        });
    }
    let theirs = Rc::clone(trial);
    world.spawn(process, async move { theirs.recover(number, process, &clock).await });
}

impl<F: Family> Trial<F> {
    /// Repairs the store again and again, until the process dies.
    async fn recover(&self, number: u32, process: ProcessId, clock: &ProcessClock) {
        let Trial { scene, family, .. } = self;
        let (world, random) = (&scene.world, scene.world.random());
        world.sleep(random.heavy(family.recovers_after())).await;
        let fabric = connected::<F>(scene, number, process, clock, STARTS_WITHIN).await;
        loop {
            let recovery = family.recover(scene, &fabric);
            let recovered = match random.one_in(DROP_ONE_IN) {
                true => within(world, random.heavy(200 * MICROS), recovery).await.unwrap_or(Ok(())),
                false => recovery.await,
            };
            recovered.err().into_iter().for_each(|why| scene.blame(why));
            world.sleep(random.heavy(family.recovers_after())).await;
        }
    }
}

/// Opens the sessions of a recoverer.
async fn connected<F: Family>(
    scene: &Rc<Scene>,
    number: u32,
    process: ProcessId,
    clock: &ProcessClock,
    at_most: u64,
) -> Tracked {
    let pool = Pool::open(scene, number, process, clock);
    pool.all_opened(at_most).await;
    Tracked::recovering::<F>(Reach::Pool(pool), scene, number)
}

/// Kills all recoverers. Then, after the faults have ended and all clients have stopped, one last recoverer repairs
/// everything.
pub(crate) fn finish<F: Family>(trial: &Rc<Trial<F>>) {
    let scene = &trial.scene;
    let (theirs, number) = (Rc::clone(trial), scene.recoverers().start);
    let process = scene.world.start_process();
    let clock = ProcessClock::new(&scene.world, 0, &scene.struck, Target::Client(number));
    let recovered = scene.world.complete(10 * SECONDS, async move {
        let Trial { scene, family, .. } = &*theirs;
        let fabric = connected::<F>(scene, number, process, &clock, SECONDS).await;
        family.recover_all(scene, &fabric).await
    });
    scene.world.kill(process);
    match recovered {
        Some(Ok(())) => {}
        Some(Err(why)) => scene.blame(format!("a recovery fails after the faults have ended: {why}")),
        None => scene.blame("a recovery does not end, after the faults have ended".to_owned()),
    }
}

/// Kills all recoverers. No other ones follow.
pub(crate) fn stop(scene: &Scene) {
    scene.is_recovering.set(false);
    for number in scene.recoverers() {
        let process = scene.clients.borrow()[number as usize];
        process.into_iter().for_each(|process| scene.world.kill(process));
    }
}
