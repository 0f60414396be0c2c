scheme misplaced_store_condition

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine when "bits" == 4 {
    q = "weight" : u8
}
