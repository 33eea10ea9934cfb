//! x

use farside_sim::litmus::{Program, programs};

#[test]
fn counts() {
    let start = std::time::Instant::now();
    let programs = programs();
    println!("{} in {:?}", programs.len(), start.elapsed());
    let mut by = std::collections::BTreeMap::new();
    for program in &programs {
        let again: Program = program.to_string().parse().unwrap();
        assert_eq!(again.to_string(), program.to_string());
        let e: &mut (u32, usize, u128) = by.entry(program.name().to_string()).or_default();
        e.0 += 1;
        let start = std::time::Instant::now();
        e.1 = e.1.max(program.allowed(true).len());
        e.2 = e.2.max(start.elapsed().as_micros());
    }
    println!("{by:#?}");
    for program in programs.iter().take(12) {
        println!("{program}");
        for o in program.allowed(false) {
            println!("    {}", program.text_of(&o));
        }
    }
}
