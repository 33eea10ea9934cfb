//! Conformance tests: what every fabric must do, whichever side runs its chains, and under any executor. A new fabric
//! is added here by one line.

#[macro_use]
mod suite;

conformance!(local, Local);
conformance!(shm, Shm);
conformance!(udp, Engine<Udp>);
conformance!(sealed_udp, Engine<SealedUdp>);
conformance!(tcp, Engine<Tcp>);
conformance!(tls, Engine<Tls>);
conformance!(ring, Engine<Rings>);
conformance!(far_local, Far<Local>);
conformance!(far_udp, Far<Engine<Udp>>);
